"""The guard: per round, the size of the draft's tree, or none, by predicted tokens per second.

Prediction. Tokens per round come from past rounds (`guard_acceptance`), seconds from the cost table (`costs`).

Choice. While some choice is expected to be faster than plain passes, the one with the highest upper confidence bound of
tokens per second is played (UCB with discounted counts, Garivier & Moulines 2011). While none is, rounds are plain, and
one is tried now and then, at intervals that double as long as it does not pay.

Bound. Every round is booked against a plain pass: tokens it brought, less what it cost in plain passes. A tree is
tried only if the account stays above -(1 + 1% of the tokens written) even when no guess is right. So in every text,
at every length, the guard's own account is at most one plain pass and 1% behind plain decoding. This is the rule of
conservative bandits (Wu et al. 2016, "Conservative Bandits", section 3), whose default is the plain pass; it holds
whatever the drafts do, as far as the times of the table hold. Greedy text for which saved statistics or earlier calls
promise a gain may fall three passes behind, not one: where a tree costs two passes, one unlucky round would end it all.

No choice looks at a token: for sampled text it is a function of the table, of past rounds' numbers of tokens and of
saved statistics, so the distribution is exact and a seed repeats its text. Where `live` is set (greedy text, which no
choice can change), the times of the running call correct the table.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from selfspec.inference.choices import OFF, Choice, Round
from selfspec.inference.guard.acceptance import Experience, per_row
from selfspec.inference.guard.costs import CostTable

_GAIN = 1.01
"""What a choice must promise over plain passes."""
_SHARE, _PASSES, _TRUSTED_PASSES, _MOST_SAVED = 0.01, 1.0, 3.0, 16.0
_FIRST_WAIT, _LONGEST_WAIT = 4, 256
_CONTEXT_STEP = 32
_FEWEST_RATIOS, KEPT_RATIOS = 5, 64


@dataclass
class GuardStats:
    """What the guard did. Rounds are passes over the whole batch.

    Args:
        rounds: with a choice to make.
        off: of them, plain ones.
        probes: rounds that were tried though no gain was expected.
        sizes: rounds by nodes of the tree, the root included.
        drafts: rounds by draft.
        plain_seconds: what plain decoding would have taken for the same tokens, by the table.
        predicted_seconds: what the rounds should have taken, by the table.
        seconds: what they took.
        off_predicted: of `predicted_seconds`, those of plain rounds.
        off_seconds: of `seconds`, those of plain rounds.
    """

    rounds: int = 0
    off: int = 0
    probes: int = 0
    sizes: dict[int, int] = field(default_factory=dict)
    drafts: dict[str, int] = field(default_factory=dict)
    plain_seconds: float = 0.0
    predicted_seconds: float = 0.0
    seconds: float = 0.0
    off_predicted: float = 0.0
    off_seconds: float = 0.0

    def add(self, other: GuardStats) -> None:
        """Take in those of another call."""
        for name, value in vars(other).items():
            if isinstance(value, dict):
                mine = getattr(self, name)
                for key, count in value.items():
                    mine[key] = mine.get(key, 0) + count
            else:
                setattr(self, name, getattr(self, name) + value)

    def to_dict(self) -> dict[str, Any]:
        """Figures for JSON. A saving is the share of plain decoding's time that was not needed; negative is a loss.

        `measured_saving` compares with what plain rounds of the same calls took, where there were any.
        """
        plain = self.plain_seconds
        here = self.off_seconds / self.off_predicted if self.off_predicted else 1.0
        return {
            "rounds": self.rounds,
            "off": self.off,
            "probes": self.probes,
            "sizes": {str(size): self.sizes[size] for size in sorted(self.sizes)},
            "drafts": dict(self.drafts),
            "predicted_saving": 1 - self.predicted_seconds / plain if plain else None,
            "measured_saving": 1 - self.seconds / (plain * here) if plain else None,
        }


class Guard:
    """Steers one generation; see above.

    Args:
        table: costs.
        drafts: a name for reports and the table's key, per draft.
        experience: per draft, what is known; changed in place.
        scale: per draft, how much dearer its rounds are than the table says.
        live: correct `scale` by the times of this very call.
        trusted: believe what `experience` promises: the account may then fall to three passes instead of one.
    """

    def __init__(
        self,
        table: CostTable,
        drafts: Sequence[tuple[str, str]],
        experience: Sequence[Experience],
        scale: Sequence[float] | None = None,
        live: bool = False,
        trusted: bool = False,
    ) -> None:
        self.table = table
        self.drafts = drafts
        self.experience = list(experience)
        self.scale = list(scale or [1.0] * len(drafts))
        self.live = live
        self._passes = _TRUSTED_PASSES if trusted else _PASSES
        self.stats = GuardStats()
        self._listed: dict[tuple[Choice, float, int, int], float] = {}
        self.account = 0.0
        self.tokens = 0.0
        self._deepest = 1
        self._wait, self._next_wait = 0, _FIRST_WAIT
        self._arms = [(k, arm) for k, known in enumerate(self.experience) for arm in known.arms]
        self.ratios: dict[int | None, list[float]] = {}

    def cost(self, draft: int, choice: Choice, nodes: float, rows: int, context: int) -> float:
        """Seconds of a round. To an eighth of a node, or a running mean would be looked up anew in every round."""
        nodes = round(8 * nodes) / 8
        key = (choice, nodes, rows, context // _CONTEXT_STEP)
        if key not in self._listed:
            self._listed[key] = self.table.round(self.drafts[draft][1], choice, nodes, rows, context)
        return self.scale[draft] * self._listed[key]

    def choose(self, rows: int, context: int, deepest: int) -> Choice:
        """How to draft the next round."""
        self._deepest = deepest
        if self._wait > 0:
            self._wait -= 1
            return OFF
        if self._wants_plain():
            return OFF
        now, plain = self.stats.rounds, self.table.plain(rows, context)
        best, best_bound, gain = OFF, 1.0, 1.0
        for k, arm in self._arms:
            known = self.experience[k]
            passes = self.cost(k, arm.choice, arm.nodes, rows, context) / plain
            mean = known.mean(arm, deepest, now)
            gain = max(gain, mean / passes)
            bound = min(mean + known.spread(arm, now), 1.0 + min(arm.depth, deepest)) / passes
            if bound > best_bound and self._allows(self.cost(k, arm.choice, arm.most, rows, context) / plain):
                best, best_bound = arm.choice, bound
        if gain > _GAIN:
            self._next_wait = _FIRST_WAIT
            return best
        self._wait, self._next_wait = self._next_wait, min(2 * self._next_wait, _LONGEST_WAIT)
        self.stats.probes += best.draft is not None
        return best

    def _wants_plain(self) -> bool:
        """Whether a plain round is due that only shows how fast the machine is now."""
        return self.live and self.stats.rounds % 32 == 16 and len(self.ratios.get(None, ())) < _FEWEST_RATIOS

    def _correct(self) -> None:
        """Take this call's own times, if there are enough of them, for what a draft's rounds cost."""
        plain = self.ratios.get(None, [])
        for k in range(len(self.scale)):
            drafted = self.ratios.get(k, [])
            if min(len(plain), len(drafted)) >= _FEWEST_RATIOS:
                self.scale[k] = drift(drafted[-KEPT_RATIOS:], plain[-KEPT_RATIOS:])

    def _allows(self, passes: float) -> bool:
        """Whether the account stays within its bound even if the round brings one token only."""
        return self.account + 1 - passes >= -(self._passes + _SHARE * self.tokens)

    def learn(self, choice: Choice, result: Round) -> None:
        """Book a round, and learn from it."""
        plain, tokens = self.table.plain(result.rows, result.context), per_row(result)
        cost = listed = plain
        self.stats.rounds += 1
        if choice.draft is None:
            self.stats.off += 1
            self.stats.off_predicted += plain
            self.stats.off_seconds += result.seconds
        else:
            name = self.drafts[choice.draft][0]
            self.stats.drafts[name] = self.stats.drafts.get(name, 0) + 1
            self.stats.sizes[result.nodes] = self.stats.sizes.get(result.nodes, 0) + 1
            cost = self.cost(choice.draft, choice, result.nodes, result.rows, result.context)
            listed = cost / self.scale[choice.draft]
            arm = next(arm for _, arm in self._arms if arm.choice == choice)
            self.experience[choice.draft].learn(arm, result, self._deepest, self.stats.rounds)
        if tokens > cost / plain:
            self._wait, self._next_wait = 0, _FIRST_WAIT  # it paid: look again at once
        self.account = min(self.account + tokens - cost / plain, _MOST_SAVED)
        self.tokens += tokens
        self.stats.plain_seconds += plain * tokens
        self.stats.predicted_seconds += cost
        self.stats.seconds += result.seconds
        self.ratios.setdefault(choice.draft, []).append(result.seconds / listed)
        if self.live and self.stats.rounds % 16 == 0:
            self._correct()


def drift(drafted: Sequence[float], plain: Sequence[float]) -> float:
    """How much dearer a draft's rounds are than the table says, measured against plain rounds of the same time.

    Args:
        drafted: measured seconds over listed ones, of the draft's rounds.
        plain: the same of plain rounds. With fewer than five of either the table is believed.
    """
    if min(len(drafted), len(plain)) < _FEWEST_RATIOS:
        return 1.0
    return statistics.median(drafted) / statistics.median(plain)


def steps(factor: float) -> float:
    """A factor in powers of 1.25, so that small and passing changes of speed change no choice."""
    return float(1.25 ** round(math.log(factor, 1.25)))
