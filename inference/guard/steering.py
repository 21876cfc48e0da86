"""The guard of a server: one account for all its batches, begun anew when nothing is being written, or after a while.

Rows of a server pick their tokens by themselves (`batching`), so no text depends on what is chosen, sampled or not: the
guard learns from the clock and from all rounds before, as it does for greedy calls of `generate`.
"""

from __future__ import annotations

from selfspec.inference.choices import Choice, Round
from selfspec.inference.guard.policy import Guard, GuardStats
from selfspec.inference.guard.setup import Guarding

_ROUNDS = 1024
"""How long an account lasts: what may be lost grows with it."""


class Steering:
    """Chooses the size of every round. Used by one thread; figures may be read from others.

    Args:
        guarding: whose costs have been measured (`Guarding.prepare`).
    """

    def __init__(self, guarding: Guarding) -> None:
        self.guarding = guarding
        self._now: tuple[GuardStats, Guard] = (GuardStats(), guarding.guard(sampled=False))

    def choose(self, rows: int, context: int, deepest: int) -> Choice:
        """See `Pilot`."""
        if self._now[1].stats.rounds >= _ROUNDS:
            self.renew()
        return self._now[1].choose(rows, context, deepest)

    def learn(self, choice: Choice, result: Round) -> None:
        """See `Pilot`."""
        self._now[1].learn(choice, result)

    def renew(self) -> None:
        """Begin a new account; what was learned stays."""
        past, guard = self._now
        if guard.stats.rounds:
            self.guarding.finish(guard, sampled=False)
            total = GuardStats()
            total.add(past)
            total.add(guard.stats)
            self._now = (total, self.guarding.guard(sampled=False))

    def counts(self) -> tuple[int, int, int]:
        """Passes with a choice to make, those of them that were plain, and those tried though no gain was expected."""
        past, guard = self._now
        now = guard.stats
        return past.rounds + now.rounds, past.off + now.off, past.probes + now.probes
