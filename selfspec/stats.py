"""What a generation did: rounds, acceptance, time by stage."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

STAGES = ("prefill", "propose", "verify", "accept", "emit", "keep", "observe")


@dataclass
class Stats:
    """Counts of one or more generations. Rounds are counted per row: a pass over four rows is four rounds.

    Args:
        rows: generations.
        rounds: target passes after the prefill, times rows that took part.
        new_tokens: tokens returned, the one from the prefill included.
        committed: tokens committed by rounds, after cutting at a stop.
        accepted: committed tokens that came from the draft (the target's own token of each round left out).
        proposed: real nodes drafted.
        reached: entry d counts rounds in which more than d drafted nodes were accepted.
        entered: entry d counts rounds that accepted d nodes at least and whose tree went deeper.
        seconds: wall time by stage.
    """

    rows: int = 0
    rounds: int = 0
    new_tokens: int = 0
    committed: int = 0
    accepted: int = 0
    proposed: int = 0
    reached: list[int] = field(default_factory=list)
    entered: list[int] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(STAGES, 0.0))

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add the time of a block to a stage. On an accelerator this is the time to launch, not to finish."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] += time.perf_counter() - start

    def count_round(self, proposed: int, depth: int, accepted: int, committed: int) -> None:
        """Take in one round of one row."""
        self.rounds += 1
        self.proposed += proposed
        self.accepted += accepted
        self.committed += committed
        self.new_tokens += committed
        self.reached += [0] * (depth - len(self.reached))
        self.entered += [0] * (depth - len(self.entered))
        for d in range(depth):
            self.entered[d] += d <= accepted
            self.reached[d] += d < accepted

    def count_first(self) -> None:
        """Take in the first token of a row, which comes from the prefill."""
        self.new_tokens += 1

    def count_plain(self, first: bool) -> None:
        """Take in one token of plain decoding; the first of a row comes from the prefill, not from a round."""
        if first:
            self.count_first()
        else:
            self.count_round(0, 0, 0, 1)

    def add(self, other: Stats) -> None:
        """Take in the counts of another generation."""
        for name in ("rows", "rounds", "new_tokens", "committed", "accepted", "proposed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        for name in ("reached", "entered"):
            mine, theirs = getattr(self, name), getattr(other, name)
            mine += [0] * (len(theirs) - len(mine))
            for d, count in enumerate(theirs):
                mine[d] += count
        for stage, seconds in other.seconds.items():
            self.seconds[stage] += seconds

    @property
    def tokens_per_round(self) -> float:
        """Committed tokens per target pass, the target's own included; plain decoding has 1.0."""
        return self.committed / self.rounds if self.rounds else 0.0

    @property
    def accepted_per_round(self) -> float:
        """Committed draft tokens per target pass."""
        return self.accepted / self.rounds if self.rounds else 0.0

    @property
    def accepted_by_depth(self) -> list[float]:
        """Entry d: the share of all rounds that accepted a node at depth d + 1."""
        return [count / self.rounds for count in self.reached]

    @property
    def conditional_by_depth(self) -> list[float]:
        """Entry d: of the rounds counted in `entered[d]`, the share that accepted one node more."""
        return [r / e if e else 0.0 for r, e in zip(self.reached, self.entered, strict=True)]

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {
            "rows": self.rows,
            "rounds": self.rounds,
            "new_tokens": self.new_tokens,
            "committed": self.committed,
            "accepted": self.accepted,
            "proposed": self.proposed,
            "tokens_per_round": self.tokens_per_round,
            "accepted_per_round": self.accepted_per_round,
            "accepted_by_depth": self.accepted_by_depth,
            "conditional_by_depth": self.conditional_by_depth,
            "stage_seconds": dict(self.seconds),
        }
