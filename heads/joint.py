"""What drafts made of several drafts share: each part has its own view and its own share of one tree.

Letters: B rows, N nodes of the merged tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from selfspec.draft import Budget, Draft, DraftState, Needs, Sampling, Verified, all_needs, only_needed
from selfspec.errors import ConfigError
from selfspec.heads.merging import Merged, merge
from selfspec.target import Target
from selfspec.tree import DraftTree


@dataclass(eq=False)
class JointState(DraftState):
    """The parts' states, the tree proposed last, and what came of all trees so far.

    Args:
        states: one per part.
        merged: what was proposed last; None before the first tree.
        accepted: per part, how many accepted nodes it was the first to propose.
    """

    states: list[Any]
    merged: Merged | None
    accepted: list[int]

    def select(self, rows: Tensor) -> JointState:
        """The state of some rows."""
        merged = self.merged
        if merged is not None:
            kept = rows.tolist()
            merged = replace(merged, places=[merged.places[b] for b in kept], owners=[merged.owners[b] for b in kept])
        return JointState([state.select(rows) for state in self.states], merged, self.accepted)

    @property
    def joins(self) -> bool:
        """See `DraftState.joins`."""
        return all(getattr(state, "joins", False) for state in self.states)

    def join(self, other: JointState) -> JointState:
        """See `DraftState.join`."""
        states = [mine.join(theirs) for mine, theirs in zip(self.states, other.states, strict=True)]
        accepted = [sum(counts) for counts in zip(self.accepted, other.accepted, strict=True)]
        return JointState(states, None, accepted)


class Joint:
    """Several drafts that propose one tree.

    Args:
        parts: the drafts.
        weights: how the nodes of a tree are shared out, by part.
        by_turns: see `merging.merge`.

    Raises:
        ConfigError: no parts, or weights that do not fit them.
    """

    kind: str
    config_class: type[Any]
    by_name = False

    def __init__(self, parts: Sequence[Draft], weights: Sequence[float], by_turns: bool) -> None:
        if not parts:
            raise ConfigError(f"{type(self).kind} wants at least one draft, got none")
        if len(weights) != len(parts) or not all(weight > 0 for weight in weights):
            raise ConfigError(
                f"{type(self).kind} wants one weight above 0 per draft ({len(parts)}), got {list(weights)}"
            )
        self.parts = list(parts)
        self.weights = list(weights)
        self.by_turns = by_turns
        self.nodes: int | None = None
        """Nodes of a tree, the root included, where the budget does not say; None lets every part choose its own."""
        self.vocab_size: int | None = None
        self.kind = f"{type(self).kind}({','.join(part.kind for part in parts)})"

    def check_target(self, target: Target) -> None:
        """Raise ConfigError if a part was made for another model."""
        self.vocab_size = target.vocab_size
        for part in self.parts:
            check = getattr(part, "check_target", None)
            if check is not None:
                check(target)

    @property
    def needs(self) -> Needs:
        """All that any part reads."""
        return all_needs([part.needs for part in self.parts])

    def _view(self, part: int, verified: Verified, nodes: Tensor | None) -> Verified:
        """What one part asked for, and nothing else."""
        return only_needed(verified, self.parts[part].needs, self.needs, nodes)

    def begin(self, verified: Verified) -> JointState:
        """Start every part on the prompt."""
        states = [part.begin(self._view(i, verified, None)) for i, part in enumerate(self.parts)]
        return JointState(states, None, [0] * len(self.parts))

    def observe(self, state: JointState, verified: Verified) -> JointState:
        """Tell every part what was committed."""
        self._count(state, verified)
        for i, part in enumerate(self.parts):
            nodes = _own_nodes(state.merged, i, verified)
            state.states[i] = part.observe(state.states[i], self._view(i, verified, nodes))
        return JointState(state.states, None, state.accepted)

    def _count(self, state: JointState, verified: Verified) -> None:
        if state.merged is None or verified.nodes is None:
            return
        rows = zip(state.merged.owners, verified.node_lists, verified.count_list, strict=True)
        for owners, nodes, count in rows:
            for node in nodes[1:count]:
                state.accepted[owners[node]] += 1

    def propose(
        self, state: JointState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """Every part's tree within its share, merged.

        Parts are asked in order. What a part leaves of its share goes to those after it, unless it drew nodes by
        chance: then the size of its tree may tell what was drawn, and siblings that are there or not for such a reason
        are not draws from their q any more.
        """
        nodes = self.nodes if budget.nodes is None else budget.nodes
        left = None if nodes is None else nodes - 1
        trees = []
        for i, part in enumerate(self.parts):
            share = None if left is None else round(left * self.weights[i] / sum(self.weights[i:]))
            own = Budget(None if share is None else share + 1, budget.depth)
            tree = part.propose(state.states[i], own, sampling, generator)
            tree = tree.limit_depth(budget.depth)
            trees.append(tree if own.nodes is None else tree.limit_nodes(own.nodes))
            if left is not None and share is not None:
                left -= share if tree.drawn is not None else min(share, tree.nodes - 1)
        if not sampling.do_sample:
            trees = [replace(tree, drawn=None) for tree in trees]
        state.merged = merge(trees, self.by_turns, self.vocab_size or 0)
        return state.merged.tree


def _own_nodes(merged: Merged | None, part: int, verified: Verified) -> Tensor | None:
    """The accepted nodes by their numbers in the part's own tree; None when the path left that tree."""
    if merged is None or verified.nodes is None:
        return None
    rows = []
    for places, nodes, count in zip(merged.places, verified.node_lists, verified.count_list, strict=True):
        number = {place: node for node, place in reversed(list(enumerate(places[part]))) if place >= 0}
        if any(node not in number for node in nodes[:count]):
            return None
        rows.append([number.get(node, 0) for node in nodes])
    return torch.tensor(rows, device=verified.nodes.device)
