"""Measuring what rounds cost: a generation of its own through the real engine, its rounds taking turns.

Every choice is played once before it counts (allocations, first-call compilation), then in turn with all others, so
that a slow moment of the machine hits them alike; medians are kept. A draft is played twice in succession and only the
second round counts: the first one shows it what it missed while others played.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
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
_MOST_TURNS = 9
_ROOM = 24


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
    """A pilot that plays choices in turn and keeps their times."""

    def __init__(self, drafts: int, sizes: Sequence[int], asked: Sequence[tuple[int | None, int | None]]) -> None:
        target = [OFF if size == 1 else Choice(0, size) for size in sizes]
        drafted = [Choice(i + 1, *what) for i in range(drafts) for what in asked]
        self.cycle = [*target, *(choice for choice in drafted for _ in range(2))]
        self.place = 0
        self.rounds: dict[Choice, list[Round]] = {choice: [] for choice in [*target, *drafted]}

    @property
    def turns(self) -> int:
        """How many whole cycles were played."""
        return self.place // len(self.cycle)

    def choose(self, rows: int, context: int, deepest: int) -> Choice:
        """The next one."""
        return self.cycle[self.place % len(self.cycle)]

    def learn(self, choice: Choice, result: Round) -> None:
        """Keep the time, unless this round only led up to the one that counts."""
        place = self.place % len(self.cycle)
        if choice != self.cycle[place]:
            return  # a target with recurrent state needs a plain pass now and then
        self.place += 1
        if choice.draft in (None, 0) or self.cycle[place - 1] == choice:
            self.rounds[choice].append(result)


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
        seconds: start no further turn after this time; two turns are always made.
        sizes: nodes per tree.
        asked: what each draft is asked for, nodes and depth.
        settle: turns that are played before anything counts, the clock included (a compiler is at work).
        whole: measure rounds that make all logits; else those that want no more than the likeliest tokens, or where the
            output head has given those up (`Target.screens`), no more than a draw.

    Raises:
        ConfigError: the model is made for too short texts.
        LogitsNeeded: the output head gave up what was measured; ask again for what it still does.
    """
    script = _Script(len(drafts), sizes, asked)
    room = _ROOM * len(script.cycle)
    if target.max_positions is not None:
        room = min(room, target.max_positions - len(text))
    if room < (2 + settle) * len(script.cycle):
        raise ConfigError(f"a text of {len(text)} tokens leaves no room to measure on; give a shorter one")
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
        begun = time.perf_counter()
        while generation.rows and script.turns < _MOST_TURNS + settle:
            if script.turns < settle:
                begun = time.perf_counter()
            elif script.turns >= 2 + settle and time.perf_counter() - begun > seconds:
                break
            generation.round()
    if not whole and spared > (target.screens, target.draws):
        raise LogitsNeeded
    if not all(script.rounds.values()):
        raise ConfigError(f"{room} tokens behind a text of {len(text)} are too few to measure on; give a shorter one")
    return _group(script, drafts, len(text), 1 + settle)


def _group(script: _Script, drafts: Sequence[Draft], context: int, skipped: int) -> Group:
    rows = script.rounds[OFF][0].rows
    medians, noise = {}, {}
    for choice, results in script.rounds.items():
        times = [r.seconds for r in _counted(results, skipped)]
        if choice.draft in (None, 0):
            size = 1 if choice.nodes is None else choice.nodes
            medians[size] = statistics.median(times)
            noise[size] = statistics.median(abs(t - medians[size]) for t in times) / len(times) ** 0.5
    group = Group(rows, context, smoothed(medians, noise))
    for i, draft in enumerate(drafts):
        asked = [_asked(c, _counted(r, skipped), group) for c, r in script.rounds.items() if c.draft == i + 1 and r]
        group.drafts[draft_key(draft)] = _distinct(asked)
    return group


def _counted(results: Sequence[Round], skipped: int) -> Sequence[Round]:
    """Without the first turns."""
    return results[skipped:] or results[-1:]


def _asked(choice: Choice, results: Sequence[Round], group: Group) -> Asked:
    added = statistics.median(r.seconds - group.round(r.nodes) for r in results)
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
