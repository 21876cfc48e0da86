"""What drafts share in which the target drafts for itself: a cheap pass per level, and the tree of its guesses.

A round runs a trunk: one token per level, each through a cheap pass of the target (`selfspec.draft_pass`) on the
target's own cache. What comes after the trunk's best guess at each level costs nothing more and may branch off. With
`beam` above one, a tree is grown by the draft's confidence instead (Li et al. 2024, EAGLE-2, section 4).

Letters: B rows, N tree nodes, m trunk levels, k children per level, D hidden size, Q draft vocabulary.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from selfspec.cache import SlotCache
from selfspec.draft import Budget, DraftState, Needs, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.head import DraftConfig
from selfspec.heads.trees import CandidatePool
from selfspec.heads.trunk import ReducedOutput, Trunk, WholeOutput
from selfspec.switches import Plan
from selfspec.target import Target
from selfspec.tree import Computed, DraftTree, TreeShape

_DEPTHS = (2, 3, 4, 6, 8)

S = TypeVar("S", bound="SelfDraft")


@dataclass(kw_only=True)
class SelfDraftConfig(DraftConfig):
    """Configuration that all self-drafts have.

    `threshold` to `memory` are the adaptive draft exit of Zhang et al. 2023, "Draft & Verify", section 3.3: drafting
    stops after a token in which the draft had less confidence than a threshold, and the threshold follows the share of
    drafted tokens that was accepted. It looks at the distribution, not at what was drawn, so drawn tokens stay exact.

    Args:
        depth: the most levels of a round.
        nodes: nodes of a tree, the root included, unless the budget says otherwise.
        top_k: children proposed per level; the first of them goes on.
        beam: nodes that go on per level; above 1 the tree follows the draft's confidence (never with `draws`).
        draws: when the target samples, draw nodes from the draft's distribution instead of taking the likeliest.
        draft_vocab_size: Q; 0 is the whole vocabulary, which costs the whole output head at every level.
        vocab_ids: the target's ids of the draft vocabulary. None with a size takes the tokens of the prompt and fills
            up with the lowest ids, which byte-pair vocabularies give to frequent pieces.
        threshold: the confidence below which drafting stops, at the start of a generation; 0 never stops.
        adaptive: let the threshold follow the acceptance.
        wanted_rate: the share of drafted tokens that should be accepted.
        threshold_step: how far one round moves the threshold.
        rate_memory: weight of earlier rounds in the rate of acceptance.
        threshold_memory: weight of the earlier threshold.
    """

    depth: int = 6
    nodes: int = 8
    top_k: int = 2
    beam: int = 1
    draws: bool = False
    draft_vocab_size: int = 0
    vocab_ids: list[int] | None = None
    threshold: float = 0.6
    adaptive: bool = True
    wanted_rate: float = 0.9
    threshold_step: float = 0.01
    rate_memory: float = 0.5
    threshold_memory: float = 0.9

    def __post_init__(self) -> None:
        if min(self.depth, self.nodes, self.top_k, self.beam) < 1:
            raise ConfigError(
                f"depth {self.depth}, nodes {self.nodes}, top_k {self.top_k} and beam {self.beam} must be at least 1"
            )
        if self.beam > 1 and self.draws:
            raise ConfigError(
                "a beam chooses nodes by their scores, so they cannot be drawn; use draws or beam, not both"
            )
        shares = (self.threshold, self.wanted_rate, self.threshold_step, self.rate_memory, self.threshold_memory)
        if not all(0 <= share <= 1 for share in shares):
            raise ConfigError(f"thresholds, rates and memories lie in 0..1, got {shares}")
        if self.vocab_ids is not None and self.draft_vocab_size not in (0, len(self.vocab_ids)):
            raise ConfigError(f"draft_vocab_size is {self.draft_vocab_size}, but vocab_ids holds {len(self.vocab_ids)}")
        if self.vocab_ids is not None:
            self.draft_vocab_size = self.draft_vocab_size or len(self.vocab_ids)


@dataclass(eq=False)
class SelfState(DraftState):
    """The target's cache, and per row the newest token, the exit threshold, the rate of acceptance `[B]` each.

    `drafted` counts the trunk's tokens of the last round, per row. `plan` and `output` serve all rows.
    """

    cache: SlotCache
    root: Tensor
    plan: Plan
    output: WholeOutput
    threshold: Tensor
    rate: Tensor
    drafted: list[int]

    def select(self, rows: Tensor) -> SelfState:
        """The state of some rows; the engine takes care of the cache."""
        self.root, self.threshold, self.rate = self.root[rows], self.threshold[rows], self.rate[rows]
        self.drafted = [self.drafted[row] for row in rows.tolist()]
        return self


class SelfDraft(ABC):
    """A draft that runs parts of the target. Subclasses say which (`plan`).

    Raises:
        UnsupportedModel: the target's parts cannot be left out or replaced; the message says why.
    """

    kind: ClassVar[str]
    config_class: ClassVar[type[SelfDraftConfig]]
    needs = Needs(cache=True)
    shares = False
    """Whether verification goes on from the hidden states at the exit, where the plan has one."""

    def __init__(self, config: SelfDraftConfig, target: Target) -> None:
        config.kind = self.kind
        self.config = config
        self.target = target
        self._added: Mapping[str, Callable[[Tensor], Tensor]] = {}
        self._output: WholeOutput | None = None
        if not config.draft_vocab_size:
            self._output = WholeOutput(target)
        elif config.vocab_ids is not None:
            self._output = ReducedOutput(target, torch.tensor(config.vocab_ids, device=target.device))

    @classmethod
    def from_target(
        cls: type[S], config: Any = None, target: Target | None = None, generator: torch.Generator | None = None
    ) -> S:
        """The draft of this target. There are no weights, so `generator` is not used."""
        if target is None:
            raise ConfigError(f"{cls.kind} is made of the target, give one")
        return cls(config or cls.config_class(), target)

    @abstractmethod
    def plan(self) -> Plan:
        """What the draft pass leaves out or replaces."""

    def adapt(self, added: Mapping[str, Callable[[Tensor], Tensor]], output: WholeOutput) -> None:
        """Draft with updates of the target's linear modules (see `Plan.added`), and through another output head.

        What the passes compute is not the target's own work any more, so verification cannot go on from it.
        """
        self._added, self._output, self.shares = added, output, False

    def adapted_plan(self) -> Plan:
        """What a draft pass leaves out, replaces and adds."""
        return replace(self.plan(), added=self._added)

    def check_target(self, target: Target) -> None:
        """Raise ConfigError unless this draft was made for that model."""
        if self.target.model is not target.model:
            raise ConfigError(f"this {self.kind} draft was made for another model object; make it for this one")

    # Tuning: see `selfspec.inference.tune`

    @classmethod
    def knobs(cls, target: Target) -> dict[str, tuple[Any, ...]]:
        """What `selfspec tune` may set, and the values to choose from."""
        return {"depth": _DEPTHS}

    @classmethod
    def start(cls, target: Target) -> dict[str, Any]:
        """The values to try first."""
        return {"depth": cls.config_class().depth}

    @classmethod
    def tuned(cls, base: Any, values: Mapping[str, Any]) -> Any:
        """The configuration `base` with these knobs set."""
        return replace(base, depth=values.get("depth", base.depth))

    @classmethod
    def shuffled(cls, values: Mapping[str, Any], chance: random.Random) -> dict[str, Any] | None:
        """Other values of the same cost, by chance; None where the method has none to compare with."""
        return None

    # The Draft interface

    @torch.no_grad()
    def begin(self, verified: Verified) -> SelfState:
        """Start on the prompt that the cache holds."""
        assert verified.cache is not None
        root = verified.root
        threshold = torch.full(root.shape, self.config.threshold, device=root.device)
        rate = torch.full_like(threshold, self.config.wanted_rate)
        plan = self.target.passes.check(self.adapted_plan())
        output = self._output or ReducedOutput(self.target, self._ids_of(verified))
        return SelfState(verified.cache, root, plan, output, threshold, rate, [0] * root.numel())

    @torch.no_grad()
    def observe(self, state: SelfState, verified: Verified) -> SelfState:
        """Take the newest tokens, and move the thresholds."""
        assert verified.cache is not None
        state.cache, state.root = verified.cache, verified.root
        if self.config.adaptive:
            self._adapt(state, verified.counts)
        state.drafted = [0] * len(state.drafted)
        return state

    @torch.no_grad()
    def propose(
        self, state: SelfState, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """A trunk with branches, or a tree of a beam."""
        guesses = budget.guesses(self.config.nodes)
        levels = min(self.config.depth, budget.depth, guesses)
        if levels < 1:
            state.drafted = [0] * len(state.drafted)
            return DraftTree.root_only(state.root)
        if self.config.beam > 1:
            return self._grow(state, levels, guesses)
        draws = self.config.draws and sampling.do_sample
        children = self._children(levels, guesses, draws)
        trunk = Trunk(state.root, children, sampling if draws else None, generator)
        return self._run_trunk(state, trunk, levels, guesses)

    def _children(self, levels: int, guesses: int, draws: bool) -> int:
        """Children per level. With drawn nodes the number must not depend on what is drawn, nor a choice among them."""
        most = guesses // levels if draws else guesses
        return max(1, min(self.config.top_k, most))

    # Trunk

    def _run_trunk(self, state: SelfState, trunk: Trunk, levels: int, guesses: int) -> DraftTree:
        exits: list[Tensor] = []
        tokens = state.root.unsqueeze(1)
        for level in range(levels):
            shape = TreeShape.chain(level, tokens.device)
            hidden, exit_hidden = self.target.passes.run(shape, tokens, state.cache, state.plan)
            if self.shares and exit_hidden is not None:
                exits.append(exit_hidden)
            columns = trunk.add(state.output(hidden)[:, 0], state.threshold)
            tokens = state.output.to_target(columns[:, :1])
            if not trunk.goes_on():
                break
        state.drafted = trunk.lengths()
        computed = None
        if exits and state.plan.stop is not None:
            computed = Computed(state.plan.stop, torch.cat(exits, 1))
        return trunk.tree(guesses, state.output, computed)

    # Beam

    def _grow(self, state: SelfState, levels: int, guesses: int) -> DraftTree:
        """Nodes stand in the cache in the order of the beams, not of the tree, so verification starts anew."""
        pool = CandidatePool(state.root.shape[0], self.config.beam, state.root.device)
        parents = torch.full_like(state.root, -1).unsqueeze(1)
        tokens, first = state.root.unsqueeze(1), 0
        for level in range(levels):
            hidden, _ = self.target.passes.run(TreeShape(parents), tokens, state.cache, state.plan)
            columns, origin = pool.grow(state.output(hidden))
            if level == levels - 1 or pool.settled(guesses):
                break
            tokens = state.output.to_target(columns)
            parents, first = torch.cat([parents, first + origin], 1), parents.shape[1]
        columns, shape = pool.best(guesses)
        state.drafted = shape.depth.amax(1).expand(len(state.drafted)).tolist()
        return DraftTree(torch.cat([state.root.unsqueeze(1), state.output.to_target(columns)], 1), shape)

    # Thresholds and vocabulary

    def _adapt(self, state: SelfState, counts: Tensor) -> None:
        """Draft & Verify, equations 2 and 3, row by row; rounds without guesses say nothing."""
        config = self.config
        drafted = torch.tensor(state.drafted, device=counts.device)
        accepted = (counts - 1).clamp(max=drafted) / drafted.clamp(min=1)
        rate = config.rate_memory * state.rate + (1 - config.rate_memory) * accepted
        step = torch.where(rate <= config.wanted_rate, config.threshold_step, -config.threshold_step)
        moved = state.threshold + (1 - config.threshold_memory) * step
        state.rate = torch.where(drafted > 0, rate, state.rate)
        state.threshold = torch.where(drafted > 0, moved.clamp(0, 1), state.threshold)

    def _ids_of(self, verified: Verified) -> Tensor:
        """The tokens of all prompts, and the lowest ids."""
        size = self.config.draft_vocab_size
        if not 0 < size <= self.target.vocab_size:
            raise ConfigError(f"draft_vocab_size {size} is not in 1..{self.target.vocab_size}, the target's vocabulary")
        real = torch.arange(verified.tokens.shape[1], device=verified.counts.device) < verified.counts.unsqueeze(1)
        seen = torch.zeros(self.target.vocab_size, dtype=torch.int8, device=verified.tokens.device)
        seen[verified.tokens[real]] = 1
        seen[verified.root] = 1
        return seen.sort(descending=True, stable=True).indices[:size]
