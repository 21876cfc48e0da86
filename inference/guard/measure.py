"""Measuring what rounds cost: a generation of its own through the real engine, its rounds taking turns.

Every choice is played once before it counts (allocations, first-call compilation). Then the sizes of the target's pass
take turns, so that a slow moment of the machine hits them alike, and after them, draft by draft, what each is asked
for; medians are kept. Where the host waits for each stage, the cost of a draft with weights of its own is what its
stages took, which the noise of the target's pass does not touch; else it is what the round took more than one with a
draft that costs nothing.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LogitsProcessorList, StoppingCriteriaList
from transformers.generation import MaxLengthCriteria

from selfspec.draft import Budget, Draft, DraftState, Needs, Sampling, Verified
from selfspec.errors import ConfigError
from selfspec.inference.choices import OFF, Choice, Round
from selfspec.inference.drafting import Pick
from selfspec.inference.engine import Generation
from selfspec.inference.guard.costs import Asked, Group, draft_key, smoothed
from selfspec.inference.output import Output
from selfspec.inference.request import Request
from selfspec.target import Target
from selfspec.tree import DraftTree, TreeShape

SIZES = (1, 2, 4, 8, 16, 32)
ASKED = ((None, None), (2, None), (4, None), (8, None), (8, 2), (16, None), (32, None))
_FEWEST_TURNS, _MOST_TURNS = 3, 5
_OVERTIME = 3.0
"""A part may take so many times its seconds for the sake of `_FEWEST_TURNS`."""
_ROOM = 40
_NOISE = 0.05
"""How far a median of fewer than three times may be off."""


@dataclass(frozen=True, eq=False)
class _Roots(DraftState):
    """The newest token of each row, `[B]`."""

    root: torch.Tensor

    def select(self, rows: torch.Tensor) -> _Roots:
        """Some rows."""
        return _Roots(self.root[rows])


class Free:
    """A draft that costs nothing and guesses a line of as many nodes as it is asked for, so that a pass can be timed.

    Args:
        vocab_size: of the target.
    """

    kind = "free"
    needs = Needs()

    def __init__(self, vocab_size: int) -> None:
        self.vocab_size = vocab_size

    def begin(self, verified: Verified) -> _Roots:
        """Note the root."""
        return _Roots(verified.root)

    def observe(self, state: _Roots, verified: Verified) -> _Roots:
        """Note the root."""
        return _Roots(verified.root)

    def propose(
        self, state: _Roots, budget: Budget, sampling: Sampling, generator: torch.Generator | None
    ) -> DraftTree:
        """A line of arbitrary tokens."""
        length = min((budget.nodes or 1) - 1, budget.depth)
        steps = torch.arange(length + 1, device=state.root.device)
        tokens = (state.root.unsqueeze(1) + steps * 7919) % self.vocab_size
        return DraftTree(tokens, TreeShape.chain(length, tokens.device))


class LogitsNeeded(Exception):
    """Rounds that were to do without all logits came to make them, so their times are those of neither kind."""


class _Script:
    """A pilot that plays choices in turn and keeps their times.

    Args:
        parts: the target's sizes, then what each draft is asked for; each part takes turns of its own.
        settle: whole turns of all parts, after the first, that do not count.
        seconds: how long each part should take.
    """

    def __init__(self, parts: Sequence[Sequence[Choice]], settle: int, seconds: Sequence[float]) -> None:
        self.rounds: dict[Choice, list[Round]] = {choice: [] for part in parts for choice in part}
        self.turns = 0
        self._steps = self._plan(parts, settle, seconds)
        self._now: tuple[Choice, bool] | None = next(self._steps)

    @staticmethod
    def fewest_rounds(parts: Sequence[Sequence[Choice]], settle: int) -> int:
        """Rounds until every choice has been played once in a turn that counts."""
        return sum((2 + settle) * len(part) + 1 for part in parts)

    def _plan(
        self, parts: Sequence[Sequence[Choice]], settle: int, seconds: Sequence[float]
    ) -> Iterator[tuple[Choice, bool]]:
        """What to play, and whether it counts."""
        for _ in range(1 + settle):
            yield from ((choice, False) for part in parts for choice in part)
            self.turns += 1
        for part, limit in zip(parts, seconds, strict=True):
            yield part[0], False  # shows a draft what it missed while others played
            begun = time.perf_counter()
            for counted in range(1, _MOST_TURNS + 1):
                yield from ((choice, True) for choice in part)
                self.turns += 1
                taken = time.perf_counter() - begun
                if taken > limit * (1.0 if counted >= _FEWEST_TURNS else _OVERTIME):
                    break

    @property
    def done(self) -> bool:
        """Whether all has been played."""
        return self._now is None

    def choose(self, rows: int, context: int, deepest: int) -> Choice:
        """The next one."""
        return OFF if self._now is None else self._now[0]

    def learn(self, choice: Choice, result: Round) -> None:
        """Keep the time if it counts."""
        if self._now is None or choice != self._now[0]:
            return  # a target with recurrent state needs a plain pass now and then
        if self._now[1]:
            self.rounds[choice].append(result)
        self._now = next(self._steps, None)


def measure(
    target: Target,
    drafts: Sequence[Draft],
    text: Sequence[int],
    rows: int = 1,
    seconds: float = 4.0,
    sizes: Sequence[int] = SIZES,
    asked: Sequence[tuple[int | None, int | None]] = ASKED,
    settle: int = 0,
    whole: bool = True,
) -> Group:
    """Measure one batch size at one context length.

    Args:
        target: the model.
        drafts: whose cost to measure.
        text: tokens to begin with, the same in all rows.
        rows: texts in the batch.
        seconds: about how long to take turns that count; half of it for the target, half for the drafts. One such turn
            is always made, three if they do not take three times as long.
        sizes: nodes per tree.
        asked: what each draft is asked for, nodes and depth.
        settle: turns that are played before anything counts, beside the first (a compiler is at work).
        whole: measure rounds that make all logits; else those that want no more than the likeliest tokens, or where the
            output head has given those up (`Target.screens`), no more than a draw.

    Raises:
        ConfigError: the model is made for too short texts.
        LogitsNeeded: the output head gave up what was measured; ask again for what it still does.
    """
    target_part = [OFF if size == 1 else Choice(0, size) for size in sizes]
    parts = [target_part, *([Choice(i + 1, *what) for what in asked] for i in range(len(drafts)))]
    room = _ROOM * sum(map(len, parts))
    if target.max_positions is not None:
        room = min(room, target.max_positions - len(text))
    if room < _Script.fewest_rounds(parts, settle):
        raise ConfigError(f"{room} positions behind a text of {len(text)} tokens leave no room to measure on")
    script = _Script(parts, settle, [seconds / 2, *(seconds / 2 / len(drafts) for _ in drafts)])
    ids = torch.tensor([list(text)] * rows, device=target.device)
    stopping = StoppingCriteriaList([MaxLengthCriteria(len(text) + room)])
    generator = torch.Generator(target.device)
    if not whole:
        target.screen()
    spared = target.screens, target.draws
    sampled = target.screens if whole else target.draws and not target.screens
    request = Request(ids, None, LogitsProcessorList(), stopping, do_sample=sampled, generator=generator)
    with torch.no_grad():
        generation = Generation(target, Pick([Free(target.vocab_size), *drafts]), request, Output(request), script)
        generation.draws = sampled and not whole
        generation.prefill()
        while generation.rows and not script.done:
            generation.round()
    if not whole and spared > (target.screens, target.draws):
        raise LogitsNeeded
    if not all(script.rounds.values()):
        raise ConfigError(f"{room} tokens behind a text of {len(text)} are too few to measure on")
    return _group(script.rounds, drafts, len(text))


def _group(rounds: dict[Choice, list[Round]], drafts: Sequence[Draft], context: int) -> Group:
    medians, noise = {}, {}
    for choice, results in rounds.items():
        if choice.draft in (None, 0):
            times = [r.seconds for r in results]
            size = 1 if choice.nodes is None else choice.nodes
            medians[size] = statistics.median(times)
            noise[size] = _noise(times)
    group = Group(rounds[OFF][0].rows, context, smoothed(medians, noise))
    for i, draft in enumerate(drafts):
        direct = not draft.needs.cache  # passes of the target that draft may spare the next one some of its work
        asked = [_asked(choice, results, group, direct) for choice, results in rounds.items() if choice.draft == i + 1]
        group.drafts[draft_key(draft)] = _distinct(asked)
    return group


def _noise(times: Sequence[float]) -> float:
    """How far the median of some times may be off."""
    median = statistics.median(times)
    if len(times) < _FEWEST_TURNS:
        return _NOISE * median
    return statistics.median(abs(t - median) for t in times) / len(times) ** 0.5


def _asked(choice: Choice, results: Sequence[Round], group: Group, direct: bool) -> Asked:
    added = statistics.median(
        r.drafted if direct and r.drafted is not None else r.seconds - group.round(r.nodes) for r in results
    )
    gave = statistics.fmean(r.nodes for r in results)
    return Asked(choice.nodes, choice.depth, max(added, 0.0), gave, max(r.depth for r in results))


def _distinct(asked: list[Asked]) -> list[Asked]:
    """One entry for each tree that the draft gives, its own choice first."""
    seen: set[tuple[Any, ...]] = set()
    kept = []
    for one in sorted(asked, key=lambda a: (a.nodes is not None, a.nodes or 0, a.depth or 0)):
        if (one.gave, one.reached) not in seen:
            seen.add((one.gave, one.reached))
            kept.append(one)
    return kept
