"""How far a training run is, and the learning rate that follows from it."""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING

from selfspec.errors import ConfigError

if TYPE_CHECKING:
    from selfspec.train.recipe import Optimisation


_FIRST = 0.05


class Progress:
    """The share of the training that is done: of its steps, or of its minutes, whichever is further.

    With `max_minutes` the learning rate follows the clock, so that it reaches its end when the time is over however
    fast the machine happens to be; a plan of steps made from the speed of the first few would miss it when the speed
    changes. Runs limited by steps or epochs alone do not look at the clock and repeat exactly.

    Args:
        settings: schedule and limits.
        steps: optimiser steps of the whole run; None when only the clock ends it.
    """

    def __init__(self, settings: Optimisation, steps: int | None) -> None:
        if steps is None and settings.max_minutes is None:
            raise ConfigError("training has no end; set epochs, max_steps or max_minutes")
        self.settings = settings
        self.steps = steps
        self.before = 0.0
        self.start = time.monotonic()
        self.clock_share = 0.0

    def begin(self, seconds_before: float = 0.0) -> None:
        """Start the clock; `seconds_before` is what an interrupted run had used."""
        self.before, self.start = seconds_before, time.monotonic()
        self.clock_share = self.measured_share()

    @property
    def seconds(self) -> float:
        """Seconds of training so far, interrupted runs included."""
        return self.before + time.monotonic() - self.start

    def measured_share(self) -> float:
        """The share of the minutes that is over, by this process's clock; 0 without a limit."""
        limit = self.settings.max_minutes
        return 0.0 if limit is None else self.seconds / (60 * limit)

    def share(self, step: int) -> float:
        """How much of the training is done after `step` optimiser steps, 0 to 1."""
        by_steps = step / self.steps if self.steps else 0.0
        return min(max(by_steps, self.clock_share), 1.0)

    def factor(self, step: int) -> float:
        """The learning rate as a share of its highest value.

        It rises in a line over the warm-up and then falls to `min_lr` along a cosine or a line, or stays.
        """
        settings = self.settings
        done = self.share(step)
        if done < settings.warmup:
            return max(done / settings.warmup, _FIRST)  # the first step is not idle
        if settings.schedule == "constant":
            return 1.0
        left = (1 - done) / max(1 - settings.warmup, 1e-9)
        fall = left if settings.schedule == "linear" else 0.5 * (1 - math.cos(math.pi * left))
        return settings.min_lr + (1 - settings.min_lr) * fall
