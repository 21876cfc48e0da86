"""One text in the making: its prompt, sampling, stops and seed, and who reads its tokens.

Letters: P prompt tokens, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from selfspec.inference.output import origins
from selfspec.inference.request import Request
from selfspec.inference.stopping import Stopper
from selfspec.scoring import History, Processors
from selfspec.stats import Stats
from selfspec.walk import TorchChance

ROOM = 64
"""Slots of a row beyond its text, for the nodes of a tree."""


@dataclass(frozen=True)
class Likely:
    """The target's own log-probabilities at one place, before any processor.

    Args:
        chosen: of the token that was committed.
        top: the likeliest tokens and theirs, the likeliest first.
    """

    chosen: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class News:
    """What one round adds to a row.

    Args:
        tokens: the committed tokens.
        origins: for each the depth at which it was drafted, 0 if the target gave it.
        likely: for each the target's log-probabilities, if they were asked for.
        ended: `stop` (an end token), `length`, or None while the row goes on.
    """

    tokens: list[int]
    origins: list[int]
    likely: list[Likely]
    ended: str | None


class Listener(Protocol):
    """Who reads a row's tokens. Called on the thread that runs the batch, and must not raise."""

    def take(self, news: News) -> bool:
        """Take in new tokens; True ends the row (a stop string was found)."""


@dataclass(eq=False)
class Row:
    """One text in the making.

    Args:
        request: one prompt (`[1, P]`, unpadded), its processors and stopping criteria, and a generator of its own.
        listener: gets the tokens.
        top: how many of the likeliest tokens to report with each token; None reports nothing.
    """

    request: Request
    listener: Listener
    top: int | None = None
    history: History = field(init=False)
    processors: Processors = field(init=False)
    stopper: Stopper = field(init=False)
    stats: Stats = field(init=False)
    draws: bool = False
    """Whether its tokens are drawn without all logits where they can be; set by `Batch`, once and for all."""

    def __post_init__(self) -> None:
        ids = self.request.input_ids
        self.stopper = Stopper(self.request.stopping)
        self.processors = Processors(self.request.processors)
        self.history = History(ids, max(self.stopper.room(ids.shape[1]) or 0, 0) + ROOM)
        self.stats = Stats(rows=1)

    @property
    def reserved(self) -> int:
        """Slots of the cache that this row may come to need."""
        return (self.stopper.max_length or self.history.lengths[0]) + ROOM

    @property
    def chance(self) -> TorchChance:
        """The row's own randomness."""
        return TorchChance(self.request.generator, self.request.input_ids.device)

    def pick(self, scores: Tensor) -> int:
        """The target's token from processed scores `[V]`."""
        if not self.request.do_sample:
            return int(scores.argmax())
        if self.draws:
            return int(self.chance.token(scores.softmax(-1).unsqueeze(0)))
        return int(torch.multinomial(scores.softmax(-1), 1, generator=self.request.generator))

    def commit(self, tokens: list[int]) -> str | None:
        """Take in the tokens of a round up to the row's stop, behind which they are cut off; see `News.ended`."""
        keep, ended = self.stopper.cut(self.history, 0, tokens)
        del tokens[keep:]
        self.history.append(0, tokens)
        if not ended:
            return None
        return "stop" if tokens[-1] in self.stopper.end_tokens else "length"

    def tell(self, tokens: list[int], drafted: int, likely: list[Likely], ended: str | None) -> bool:
        """Tell the listener of committed tokens, `drafted` of them guessed; whether the row is over."""
        news = News(tokens, origins(drafted, len(tokens)), likely[: len(tokens)], ended)
        return self.listener.take(news) or ended is not None
