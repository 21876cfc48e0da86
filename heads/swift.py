"""Layer skipping with the set of left-out sub-layers found while generating, on the user's own context.

Xia et al. 2024, "SWIFT: On-the-Fly Self-Speculative Decoding for LLM Inference Acceleration", section 4: candidate sets
are scored by how often the draft's first choice is the token already committed, over the last tokens of the context and
in one parallel pass. One candidate is tried per round until the draft is good enough or no better set turns up. The
paper proposes candidates at random and now and then by a Gaussian process; here they are drawn at random or differ
from the best set in a few places. The first and the last layer are always left in.

Letters: B rows, T tokens scored, L layers.
"""

from __future__ import annotations

import random
import threading
from dataclasses import dataclass, field

import torch
from torch import Tensor

from selfspec.draft import Verified
from selfspec.errors import ConfigError
from selfspec.heads.layer_skip import spread
from selfspec.heads.self_draft import SelfDraft, SelfDraftConfig, SelfState
from selfspec.registry import register
from selfspec.switches import Plan
from selfspec.target import Target

_FEWEST = 8
Part = tuple[int, bool]
"""A sub-layer: its layer, and whether it is the MLP."""


@dataclass(kw_only=True)
class SwiftConfig(SelfDraftConfig):
    """Configuration of SWIFT.

    Args:
        share: of the sub-layers, how many are left out.
        window: T, how many of the newest tokens candidates are scored on.
        trials: the most candidates per generation; 0 keeps the first set.
        patience: stop after this many candidates without a better one.
        good_enough: stop at this share of right guesses.
        remember: start the next generation from the best set of earlier ones (of this draft object). Their order then
            changes drafts, never text under greedy decoding; with `draws`, turn it off for repeatable seeds.
        seed: of the candidates.
    """

    share: float = 0.45
    window: int = 32
    trials: int = 64
    patience: int = 24
    good_enough: float = 0.95
    remember: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.share < 1 or not 0 < self.good_enough <= 1:
            raise ConfigError(f"share {self.share} and good_enough {self.good_enough} are not shares below 1")
        if self.window < _FEWEST or min(self.trials, self.patience) < 0:
            raise ConfigError(f"SWIFT wants a window of at least {_FEWEST}, and trials and patience of at least 0")


@dataclass(eq=False)
class Search:
    """The search of one generation.

    Args:
        blocks: L.
        apart: whether attention and MLP may be left out one without the other.
        chance: of the candidates.
        best: the best set so far.
        left: candidates still to try.
        score: of `best`; None before it was tried.
        stale: candidates since the last better one.
    """

    blocks: int
    apart: bool
    chance: random.Random
    best: frozenset[Part]
    left: int
    score: float | None = None
    stale: int = 0

    def __post_init__(self) -> None:
        inside = [unit[0] in self.best for unit in self._units()]
        if all(inside) or not any(inside):
            self.left = 0  # there is no other set of this size

    def candidate(self) -> frozenset[Part]:
        """The next set to try, as large as the best."""
        if self.score is None:
            return self.best
        units = self._units()
        inside = [unit for unit in units if unit[0] in self.best]
        outside = [unit for unit in units if unit[0] not in self.best]
        if self.chance.random() < 0.5:
            chosen = self.chance.sample(units, len(inside))
        else:
            swaps = self.chance.randint(1, min(2, len(inside), len(outside)))
            gone = self.chance.sample(inside, swaps)
            chosen = [unit for unit in inside if unit not in gone] + self.chance.sample(outside, swaps)
        return frozenset(part for unit in chosen for part in unit)

    def _units(self) -> list[tuple[Part, ...]]:
        """What can be left out on its own: sub-layers, or whole layers."""
        inner = range(1, self.blocks - 1)
        if self.apart:
            return [((layer, mlp),) for layer in inner for mlp in (False, True)]
        return [((layer, False), (layer, True)) for layer in inner]

    def tell(self, tried: frozenset[Part], score: float) -> None:
        """Take in the score of a candidate."""
        self.left -= 1
        if self.score is None or score > self.score:
            self.best, self.score, self.stale = tried, score, 0
        else:
            self.stale += 1


@dataclass(eq=False)
class SwiftState(SelfState):
    """As of all self-drafts; and the search, and the newest tokens of each row while it lasts."""

    search: Search = field(kw_only=True)
    context: list[list[int]] = field(kw_only=True)

    def select(self, rows: Tensor) -> SwiftState:
        """The state of some rows."""
        super().select(rows)
        self.context = [self.context[row] for row in rows.tolist()]
        return self


@register("swift")
class Swift(SelfDraft):
    """Layer skipping that searches its set as it goes."""

    config_class = SwiftConfig
    config: SwiftConfig

    def __init__(self, config: SwiftConfig, target: Target) -> None:
        super().__init__(config, target)
        default = spread(target.num_layers, config.share)
        self._first = frozenset((layer, mlp) for layer in default for mlp in (False, True))
        self._apart = target.passes.parts_apart()
        self._best: frozenset[Part] | None = None
        self._lock = threading.Lock()
        target.passes.check(self.plan())

    def __getstate__(self) -> dict[str, object]:
        """Copies search for themselves; a lock cannot be copied."""
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state, _lock=threading.Lock())

    def plan(self) -> Plan:
        """The set a generation starts with."""
        with self._lock:
            return _plan_of(self._best or self._first)

    def begin(self, verified: Verified) -> SwiftState:
        """Start on the prompt; its newest tokens are the first to be scored on."""
        plain = super().begin(verified)
        parts = frozenset((k, False) for k in plain.plan.attention) | frozenset((k, True) for k in plain.plan.mlp)
        chance = random.Random(self.config.seed)
        search = Search(self.target.num_layers, self._apart, chance, parts, self.config.trials)
        rows = zip(verified.tokens.tolist(), verified.count_list, verified.root.tolist(), strict=True)
        context = [[*tokens[:count], root][-self.config.window - 1 :] for tokens, count, root in rows]
        return SwiftState(**vars(plain), search=search, context=context)

    def observe(self, state: SelfState, verified: Verified) -> SwiftState:
        """Take in the tokens and try one candidate."""
        assert isinstance(state, SwiftState)
        super().observe(state, verified)
        if not self._searching(state.search):
            return state
        rows = zip(state.context, verified.next_lists, verified.count_list, strict=True)
        state.context = [(old + tokens[:count])[-self.config.window - 1 :] for old, tokens, count in rows]
        self._try_one(state)
        return state

    def _searching(self, search: Search) -> bool:
        done = search.score is not None and search.score >= self.config.good_enough
        return search.left > 0 and search.stale < self.config.patience and not done

    def _try_one(self, state: SwiftState) -> None:
        length = min(map(len, state.context))
        if length <= _FEWEST:
            return
        ids = torch.tensor([row[-length:] for row in state.context], device=state.root.device)
        tried = state.search.candidate()
        state.search.tell(tried, self._score(state, ids, _plan_of(tried)))
        state.plan = _plan_of(state.search.best)
        if self.config.remember and state.search.best == tried:
            with self._lock:
                self._best = tried

    @torch.no_grad()
    def _score(self, state: SwiftState, ids: Tensor, plan: Plan) -> float:
        """The share of committed tokens that a draft pass would have put first. `ids` is `[B, T + 1]`."""
        hidden = self.target.passes.read_again(ids[:, :-1], state.cache, plan)
        guesses = state.output.to_target(state.output(hidden).argmax(-1).to(ids.device))
        return float((guesses == ids[:, 1:]).float().mean())


def _plan_of(parts: frozenset[Part]) -> Plan:
    return Plan(frozenset(k for k, mlp in parts if not mlp), frozenset(k for k, mlp in parts if mlp))
