"""What may be chosen for a round, and what came of it: between the engine and whoever steers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Choice:
    """How a round is drafted.

    Args:
        draft: number of the draft that guesses; None is a plain pass over one token.
        nodes: the most nodes of its tree, the root included; None leaves it to the draft.
        depth: the deepest node asked for; None sets no limit.
    """

    draft: int | None
    nodes: int | None = None
    depth: int | None = None


OFF = Choice(None)


@dataclass(frozen=True)
class Round:
    """What came of a round.

    Args:
        rows: texts of the batch that took part.
        context: committed tokens of the longest of them before the round.
        nodes: of the tree, the root included.
        depth: of the tree.
        gains: committed tokens per row, the target's own included.
        seconds: wall time of the round.
        drafted: of it, what the draft took (proposing and observing), where the round does not wait for an accelerator.
    """

    rows: int
    context: int
    nodes: int
    depth: int
    gains: list[int]
    seconds: float
    drafted: float | None = None


class Pilot(Protocol):
    """Steers one generation. A choice may hang on past rounds only, never on what this round draws."""

    def choose(self, rows: int, context: int, deepest: int) -> Choice:
        """How to draft the next round, in which no node deeper than `deepest` could be committed."""

    def learn(self, choice: Choice, result: Round) -> None:
        """Take in what came of it."""
