"""What trained heads are worth, measured: acceptance by depth and by rank, and what rounds cost on this machine.

Acceptance has no hardware in it and is kept beside the heads (`statistics.json`); costs are kept with the machine, and
a copy of them beside the heads too (`profile-*.json`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from selfspec.checkpoint import write_json
from selfspec.draft import Budget, Draft, Needs, Sampling, Verified
from selfspec.inference.bench import BenchSettings
from selfspec.inference.engine import decode
from selfspec.inference.guard.costs import CostTable, circumstances, draft_key, read_table, write_table
from selfspec.inference.guard.measure import LogitsNeeded, measure
from selfspec.inference.guard.setup import STATISTICS
from selfspec.inference.runs import prepare
from selfspec.stats import Stats
from selfspec.target import Target
from selfspec.tree import DraftTree


@dataclass
class Ranks:
    """Which sibling was accepted.

    Args:
        right: per depth, how often the sibling of each rank was.
        asked: per depth, how many rounds got there.
    """

    right: list[list[int]] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)

    def count(self, depth: int, rank: int | None) -> None:
        """Take in one node of an accepted path, or the place where it ended (None)."""
        while len(self.asked) <= depth:
            self.asked.append(0)
            self.right.append([])
        self.asked[depth] += 1
        if rank is not None:
            self.right[depth] += [0] * (rank + 1 - len(self.right[depth]))
            self.right[depth][rank] += 1

    def chances(self) -> list[list[float]]:
        """Per depth the chance of each rank, given that the path got there."""
        seen = takewhile(lambda pair: pair[0], zip(self.right, self.asked, strict=True))
        return [[right / asked for right in row] for row, asked in seen]


@dataclass(eq=False)
class Watched:
    """A draft whose accepted nodes are counted by their rank among their siblings.

    Args:
        draft: any.
        ranks: where they are counted.
    """

    draft: Draft
    ranks: Ranks = field(default_factory=Ranks)
    _tree: DraftTree | None = None

    @property
    def kind(self) -> str:
        """That of the draft."""
        return self.draft.kind

    @property
    def needs(self) -> Needs:
        """Those of the draft."""
        return self.draft.needs

    def begin(self, verified: Verified) -> Any:
        """As the draft does."""
        return self.draft.begin(verified)

    def propose(self, state: Any, budget: Budget, sampling: Sampling, generator: torch.Generator | None) -> DraftTree:
        """As the draft does."""
        self._tree = self.draft.propose(state, budget, sampling, generator)
        return self._tree

    def observe(self, state: Any, verified: Verified) -> Any:
        """As the draft does, counting."""
        if self._tree is not None and verified.nodes is not None:
            shape = self._tree.shape.host
            for row, (nodes, count) in enumerate(zip(verified.node_lists, verified.count_list, strict=True)):
                links = shape.links(row)
                path = nodes[:count]
                for depth, node in enumerate(path[1:]):
                    siblings = [i for i, parent in enumerate(links) if parent == path[depth]]
                    self.ranks.count(depth, siblings.index(node))
                if path[-1] in links:
                    self.ranks.count(len(path) - 1, None)
        self._tree = None
        return self.draft.observe(state, verified)


def acceptance(
    target: Target,
    draft: Draft,
    prompts: Sequence[list[int]],
    max_new_tokens: int = 64,
    nodes: int | None = None,
    progress: Callable[[], None] | None = None,
) -> dict[str, Any]:
    """Greedy decoding of prompts, and what of the draft was accepted; the content of `statistics.json`.

    Args:
        target: the model.
        draft: any.
        prompts: token ids of each.
        max_new_tokens: per prompt.
        nodes: of its trees; None leaves it to the draft.
        progress: called after each prompt.
    """
    watched, total = Watched(draft), Stats()
    arguments = BenchSettings(max_new_tokens).generate_arguments(max_new_tokens)
    for prompt in prompts:
        request = prepare(target, prompt, arguments)
        request.nodes = nodes
        total.add(decode(target, watched, request).stats)
        if progress is not None:
            progress()
    return {
        "draft": draft.kind,
        "temperature": 0.0,
        "rounds": total.rounds,
        "tokens_per_round": total.tokens_per_round,
        "conditional_by_depth": total.conditional_by_depth,
        "chances_by_rank": watched.ranks.chances(),
    }


def costs(
    target: Target,
    draft: Draft,
    text: Sequence[int],
    rows: Sequence[int] = (1,),
    contexts: Sequence[int] = (64, 512),
    seconds: float = 8.0,
) -> CostTable:
    """Measure rounds at several batch sizes and context lengths, and keep them for the guard.

    Args:
        target: the model.
        draft: any.
        text: tokens to begin with; repeated where a context is longer.
        rows: batch sizes.
        contexts: lengths; those that leave no room in the model are left out.
        seconds: per batch size and length.
    """
    longest = target.max_positions
    fitting = [c for c in contexts if longest is None or c <= max(longest // 2, min(contexts))]
    places = [((list(text) * (context // len(text) + 1))[:context], batch) for context in fitting for batch in rows]
    try:
        return _costs(target, draft, places, seconds, not target.screens)
    except LogitsNeeded:
        return _costs(target, draft, places, seconds, True)


def _costs(
    target: Target, draft: Draft, places: Sequence[tuple[list[int], int]], seconds: float, whole: bool
) -> CostTable:
    table = read_table(circumstances(target, whole))
    for start, batch in places:
        table.add(measure(target, [draft], start, batch, seconds, whole=whole))
    write_table(table)
    return table


def seconds_of(table: CostTable, draft: Draft, context: int) -> Callable[[int, int], float]:
    """Seconds of a round by nodes and depth of its tree, for one text; the draft costs what it costs for that size."""
    key = draft_key(draft)

    def seconds(nodes: int, depth: int) -> float:
        known = [a for a in table.asked(key) if a.reached >= depth] or table.asked(key)
        return table.plain_round(nodes, 1, context) + min(a.seconds for a in known)

    return seconds


def save(folder: Path, found: dict[str, Any], table: CostTable) -> list[Path]:
    """Write both files beside the heads; returns their paths."""
    machine = re.sub(r"[^a-z0-9]+", "-", str(table.circumstances["machine"]).lower()).strip("-")[:60]
    paths = [folder / STATISTICS, folder / f"profile-{machine}.json"]
    write_json(paths[0], found)
    write_json(paths[1], table.to_dict())
    return paths
