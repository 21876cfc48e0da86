"""How many tokens a round brings, learned from past rounds: per draft by depth, and per choice.

What a choice brings is estimated in three steps, each the prior of the next: a default or saved statistics, all rounds
of the draft by depth, the rounds of this very choice. The newer a round, the more it counts.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from selfspec.inference.choices import Choice, Round
from selfspec.inference.guard.costs import Asked

FADE = 0.985
"""What a round still counts one round later."""
_DEFAULT, _DEFAULT_WEIGHT = 0.5, 1.0
_POOL_WEIGHT, _ARM_WEIGHT = 4.0, 6.0
_CARRIED = 30.0


@dataclass
class Chain:
    """How often one more node was accepted, by depth.

    Args:
        entered: weight of the rounds that accepted d nodes at least and could have gone on.
        reached: of those that accepted one more.
    """

    entered: list[float] = field(default_factory=list)
    reached: list[float] = field(default_factory=list)

    def count(self, depth: int, accepted: int) -> None:
        """Take in one row of one round whose tree was `depth` deep."""
        missing = [0.0] * (depth - len(self.entered))
        self.entered += missing
        self.reached += missing
        for d in range(min(depth, accepted + 1)):
            self.entered[d] += 1
            self.reached[d] += d < accepted

    def fade(self, by: float) -> None:
        """Let everything count less."""
        self.entered = [value * by for value in self.entered]
        self.reached = [value * by for value in self.reached]

    def cap(self, weight: float) -> None:
        """Let nothing count more than so many rounds."""
        for d, entered in enumerate(self.entered):
            if entered > weight:
                self.reached[d] *= weight / entered
                self.entered[d] = weight

    def rate(self, depth: int, prior: float, weight: float) -> float:
        """The chance that a node at this depth is accepted when the one before was, with a prior."""
        if depth >= len(self.entered):
            return prior
        return (self.reached[depth] + prior * weight) / (self.entered[depth] + weight)


@dataclass
class Arm:
    """One choice and what it brought.

    Args:
        choice: what is asked of which draft.
        nodes: of its trees, on average, the root included.
        depth: of the deepest.
        most: nodes of the largest.
        weight: of the rounds it was played in.
        tokens: weighted sum of tokens per row.
        seen_at: the round up to which weights have faded.
    """

    choice: Choice
    nodes: float
    depth: int
    most: float
    weight: float = 0.0
    tokens: float = 0.0
    seen_at: int = 0

    def learn(self, result: Round, now: int) -> None:
        """Take in a round."""
        by = FADE ** (now - self.seen_at)
        self.weight, self.tokens, self.seen_at = self.weight * by + 1, self.tokens * by + per_row(result), now
        self.most = max(self.most, result.nodes)
        self.nodes += (result.nodes - self.nodes) / min(self.weight + _ARM_WEIGHT, 20)

    def weight_at(self, now: int) -> float:
        """The weight of its rounds, faded to now."""
        return self.weight * FADE ** (now - self.seen_at)

    def mean(self, prior: float, now: int) -> float:
        """Tokens per row and round."""
        by = FADE ** (now - self.seen_at)
        return (self.tokens * by + prior * _ARM_WEIGHT) / (self.weight * by + _ARM_WEIGHT)


def per_row(result: Round) -> float:
    """Tokens per row."""
    return sum(result.gains) / len(result.gains)


@dataclass
class Experience:
    """What is known of one draft.

    Args:
        arms: what it may be asked for.
        first: chances by depth known beforehand (saved with the heads); empty if none are.
        long: rounds of all its arms, which never fade.
        recent: the same, faded.
        rounds: weight of the recent ones.
        seen_at: the round up to which `recent` has faded.
    """

    arms: list[Arm]
    first: Sequence[float] = ()
    long: Chain = field(default_factory=Chain)
    recent: Chain = field(default_factory=Chain)
    rounds: float = 0.0
    seen_at: int = 0

    @classmethod
    def of(cls, number: int, asked: Sequence[Asked], first: Sequence[float], nodes: int | None) -> Experience:
        """Nothing yet, but what the draft gives when asked; `nodes` fixes the size of its trees."""
        if nodes == 1:
            return cls([], first)
        if nodes is not None:
            fitting = [a for a in asked if a.gave <= nodes] or list(asked)
            most = max(fitting, key=lambda a: a.gave)
            return cls([Arm(Choice(number, nodes), min(most.gave, nodes), most.reached, min(most.gave, nodes))], first)
        useful = [a for a in asked if a.reached or a.nodes is None] or list(asked)
        return cls([Arm(Choice(number, a.nodes, a.depth), a.gave, max(a.reached, 1), a.gave) for a in useful], first)

    def learn(self, arm: Arm, result: Round, deepest: int, now: int) -> None:
        """Take in a round of an arm; a node that the draft could have proposed and did not was not accepted."""
        arm.learn(result, now)
        by = FADE ** (now - self.seen_at)
        self.recent.fade(by)
        self.rounds, self.seen_at = self.rounds * by + 1, now
        arm.depth = max(arm.depth, result.depth)
        for gain in result.gains:
            self.long.count(min(arm.depth, deepest), gain - 1)
            self.recent.count(min(arm.depth, deepest), gain - 1)

    def tokens(self, depth: int, now: int) -> float:
        """Tokens per row and round to be expected of a tree of this depth, all sizes taken together."""
        by, chance, tokens = FADE ** (now - self.seen_at), 1.0, 1.0
        for d in range(depth):
            start = self.first[d] if d < len(self.first) else _DEFAULT
            weight = _CARRIED if d < len(self.first) else _DEFAULT_WEIGHT
            chance *= self.recent.rate(d, self.long.rate(d, start, weight), _POOL_WEIGHT / by)
            tokens += chance
        return tokens

    def mean(self, arm: Arm, deepest: int, now: int) -> float:
        """Tokens per row and round to be expected of an arm."""
        prior = self.tokens(min(arm.depth, deepest), now)
        return min(arm.mean(prior, now), 1.0 + min(arm.depth, deepest))

    def spread(self, arm: Arm, now: int) -> float:
        """How far that may be off: upper confidence bounds of a discounted bandit (Garivier & Moulines 2011)."""
        known = 1 + arm.weight_at(now) + 0.1 * self.rounds * FADE ** (now - self.seen_at)
        if self.first:
            known += 3
        return 0.8 * math.sqrt(math.log(2 + now) / known)

    def carried(self, now: int = 0) -> Experience:
        """A copy, as it is after `now` rounds, to begin the next text with."""
        kept = copy.deepcopy(self)
        kept.long.cap(_CARRIED)
        by = FADE ** (now - self.seen_at)
        kept.recent.fade(by)
        kept.rounds, kept.seen_at = kept.rounds * by, 0
        for arm in kept.arms:
            by = FADE ** (now - arm.seen_at)
            arm.weight, arm.tokens, arm.seen_at = arm.weight * by, arm.tokens * by, 0
        return kept
