"""Scripted costs, scripted acceptance and scripted choices for the tests of the guard."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec.draft import Draft
from selfspec.inference.choices import OFF, Choice, Round
from selfspec.inference.guard.acceptance import Experience
from selfspec.inference.guard.costs import Asked, CostTable, Group, draft_key
from selfspec.inference.guard.policy import Guard

BF16 = {1: 52.0, 2: 51.0, 4: 54.0, 8: 61.0, 16: 74.0, 32: 95.0}
FP32 = {1: 107.0, 2: 200.0, 4: 193.0, 8: 180.0, 16: 195.0, 32: 263.0}
"""Milliseconds by nodes, of Gemma-3-270M on two cores: one curve is flat at first, the other doubles at once."""


def asked(step: float) -> list[Asked]:
    """What a draft gives that takes `step` milliseconds per level."""
    shapes = [(None, None, 10, 3), (2, None, 2, 1), (4, None, 4, 2), (8, None, 8, 3), (8, 2, 8, 2)]
    shapes += [(16, None, 16, 4), (32, None, 32, 5)]
    return [Asked(nodes, depth, step * deep, gave, deep) for nodes, depth, gave, deep in shapes]


def table(curve: dict[int, float], *steps: float) -> CostTable:
    """Drafts "0", "1", ... with these costs per level."""
    return CostTable({}, [Group(1, 100, dict(curve), {str(k): asked(step) for k, step in enumerate(steps)})])


def guard(costs: CostTable, drafts: int = 1, nodes: int | None = None, first: Sequence[float] = ()) -> Guard:
    """A guard that knows these costs and nothing else."""
    names = [(str(k), str(k)) for k in range(drafts)]
    known = [Experience.of(k, costs.asked(str(k)), first, nodes) for k in range(drafts)]
    return Guard(costs, names, known, trusted=bool(first))


@dataclass
class Written:
    """A text that was written: what it cost, in plain passes, and after each round the account and the place."""

    passes: float = 0.0
    tokens: int = 0
    accounts: list[float] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    choices: list[Choice] = field(default_factory=list)


def write(
    costs: CostTable,
    pick: Callable[[int], Choice],
    chance: Callable[[int, int], float],
    tokens: int,
    seed: int,
    tell: Callable[[Choice, Round], None] | None = None,
) -> Written:
    """Write a text with scripted acceptance.

    Args:
        costs: what rounds cost.
        pick: chooses, given the deepest useful node.
        chance: of one more accepted node, by draft and tokens written; wider trees have more.
        tokens: to write.
        seed: of the acceptance.
        tell: told about every round.
    """
    draws, text = random.Random(seed), Written()
    plain = costs.plain(1, 100)
    while text.tokens < tokens:
        deepest = tokens - text.tokens - 1
        choice = pick(deepest) if deepest else OFF
        gain, nodes, depth, cost = 1, 1, 0, plain
        if choice.draft is not None:
            known = costs.asked(str(choice.draft))
            tree = next(a for a in known if (a.nodes, a.depth) == (choice.nodes, choice.depth))
            nodes, depth = int(tree.gave), min(tree.reached, deepest)
            cost = costs.round(str(choice.draft), choice, nodes, 1, 100)
            right = 1 - (1 - chance(choice.draft, text.tokens)) ** (1 + 0.4 * (nodes / tree.reached - 1) ** 0.5)
            while gain - 1 < depth and draws.random() < right:
                gain += 1
        if tell is not None:
            tell(choice, Round(1, 100, nodes, depth, [gain], cost))
        text.tokens += gain
        text.passes += cost / plain
        text.accounts.append(text.tokens - text.passes)
        text.places.append(text.tokens)
        text.choices.append(choice)
    return text


def guarded(steering: Guard, chance: Callable[[int, int], float], tokens: int, seed: int) -> Written:
    """The same, steered by a guard."""
    return write(steering.table, lambda deepest: steering.choose(1, 100, deepest), chance, tokens, seed, steering.learn)


def best_fixed(costs: CostTable, chance: Callable[[int, int], float], tokens: int, seed: int) -> float:
    """Plain passes that the best single choice takes, plain decoding included."""
    choices = [Choice(int(k), a.nodes, a.depth) for k in costs.groups[0].drafts for a in costs.asked(k)]
    written = [write(costs, lambda _, c=choice: c, chance, tokens, seed).passes for choice in choices]  # type: ignore[misc]
    return min(*written, float(tokens))


class Scripted:
    """A pilot that plays what it is told and keeps what came of it."""

    def __init__(self, choose: Callable[[int], Choice]) -> None:
        self.script = choose
        self.rounds: list[tuple[Choice, Round]] = []

    def choose(self, rows: int, context: int, deepest: int) -> Choice:
        """By the number of the round."""
        return self.script(len(self.rounds))

    def learn(self, choice: Choice, result: Round) -> None:
        """Keep it."""
        self.rounds.append((choice, result))


def group(drafts: Sequence[Draft], rows: int, curve: dict[int, float], step: float) -> Group:
    """Times of real drafts, as a measurement would have found them."""
    return Group(rows, 12, dict(curve), {draft_key(draft): asked(step) for draft in drafts})


def measured_as(curve: dict[int, float], step: float) -> Any:
    """Stands in for `measure`, and counts in `.calls` how often it was asked."""

    def measure(
        target: Any, drafts: Sequence[Draft], text: Any, rows: int = 1, seconds: float = 0.0, **_: Any
    ) -> Group:
        measure.calls.append((rows, len(text)))  # type: ignore[attr-defined]
        return group(drafts, rows, curve, step)

    measure.calls = []  # type: ignore[attr-defined]
    return measure
