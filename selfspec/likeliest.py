"""When an output head is screened (see `selfspec.screen`): only where it has been measured to be faster.

The copy is made once the full products so far have taken as long as making it will, so a short text never pays for it
and a long one at most twice. Whether it then pays is timed on real hidden states, for each number of rows by itself.

Letters: K rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from selfspec.screen import Screen, Screened

_log = logging.getLogger(__name__)

_SECONDS_PER_WEIGHT = 2e-8
"""What making the copy takes (3.4 s for 168 million weights on two cores)."""
_MOST_ROWS = 64
_TIMES = 2
_MOST_MISSES = 0.25
_FIRST_CALLS = 16


class Likeliest:
    """The likeliest tokens of a head, where they can be had without all the logits.

    Args:
        weight: `[V, D]`, by reference.
        bias: `[V]` or None, by reference.
        product: the full product, `[K, D]` to `[K, V]`.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, product: Callable[[Tensor], Tensor]) -> None:
        self.weight, self.bias, self.product = weight, bias, product
        self._spent = 0.0
        self._broken = False
        self._sizes: Tensor | None = None
        self._lock = threading.Lock()
        self._begun = self._looked = object()
        """The text that began last, and the one for which it was last looked whether the weights have changed."""
        self._forget()

    def _forget(self) -> None:
        self._screen: Screen | None = None
        self._pays: dict[int, bool] = {}
        self._calls = self._misses = self._seen = 0
        self._squares = torch.zeros(self.weight.shape[1])
        self.useless = self._broken or not Screen.applies(self.weight)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy of a model starts without, and makes its own once that pays."""
        return Likeliest.__new__, (Likeliest,), (self.weight, self.bias, self.product)

    def __setstate__(self, given: tuple[Tensor, Tensor | None, Callable[[Tensor], Tensor]]) -> None:
        Likeliest.__init__(self, *given)

    @property
    def draws(self) -> bool:
        """Whether `screened` can come to answer, which does not depend on how `__call__` has fared."""
        return not self._broken and Screen.applies(self.weight)

    def begin(self) -> None:
        """A text begins: its first use of the copy looks whether the weights have changed; without one nobody does."""
        self._begun = object()

    def _look(self) -> None:
        """Forget a copy of weights that have changed; once per text, as it takes as long as one full product."""
        begun = self._begun  # a text that begins meanwhile looks for itself
        if self._looked is begun:
            return
        if self._screen is not None and self._screen.outdated:
            self._forget()
            self._spent = 0.0
        self._looked = begun

    def prepare(self) -> None:
        """Make the copy in the next pass, whatever was spent so far."""
        self.begin()
        with self._lock:
            self._look()
            self._spent = float("inf")

    def spent(self, seconds: float) -> None:
        """A full product has taken so long."""
        self._spent += seconds

    def __call__(self, hidden: Tensor) -> Tensor | None:
        """The likeliest tokens `[K]` int64 of hidden states `[K, D]`, or None: then the full product has to tell."""
        if self.useless or len(hidden) > _MOST_ROWS or not self._ready(hidden):
            return None
        screen = self._screen
        if screen is None or not self._paid(screen, hidden):
            return None
        found = _likeliest(screen, hidden)
        self._calls += 1
        self._misses += found is None
        if self._calls >= _FIRST_CALLS and self._misses > _MOST_MISSES * self._calls:
            _log.info(
                "the output head is no longer screened: %d of %d passes needed all logits", self._misses, self._calls
            )
            self._screen, self.useless = None, True
        return found

    def screened(self, hidden: Tensor, many: bool = False) -> Screened | None:
        """The scores of hidden states `[K, D]`, to draw from. The clock has no say in whether there are any.

        Args:
            hidden: at most 64 rows are scored.
            many: or however many there are.
        """
        if not self.draws or (len(hidden) > _MOST_ROWS and not many):
            return None
        with self._lock:
            self._look()
            if self._screen is None:
                self._note(hidden)
                self._make(hidden)
            screen = self._screen
        return None if screen is None else screen(hidden)

    def _note(self, hidden: Tensor) -> None:
        self._squares = self._squares + hidden.float().square().sum(0)
        self._seen += len(hidden)

    def _make(self, hidden: Tensor) -> None:
        if self._sizes is None:  # kept for another copy, so that a seed goes on giving the same draws
            self._sizes = (self._squares / self._seen).sqrt()
        made = Screen(self.weight, self.bias, self._sizes)
        screened = made(hidden)
        if screened is None or screened.holds(self.product(hidden)):
            self._screen = made
        else:
            _log.warning("products of bytes are wrong on this processor, so the output head is not screened")
            self._broken = self.useless = True

    def _ready(self, hidden: Tensor) -> bool:
        if self._screen is None:
            self._note(hidden)
            if not self._earned:
                return False
        elif self._looked is self._begun:
            return True
        if not self._lock.acquire(blocking=False):
            return False
        try:
            self._look()
            if self._screen is None and self._earned:
                self._make(hidden)
        finally:
            self._lock.release()
        return self._screen is not None

    @property
    def _earned(self) -> bool:
        """Whether full products have taken as long as making the copy will."""
        return self._spent >= _SECONDS_PER_WEIGHT * self.weight.numel()

    def _paid(self, screen: Screen, hidden: Tensor) -> bool:
        """Whether screening so many rows is faster than the product."""
        size = 1 << (len(hidden) - 1).bit_length()
        pays = self._pays  # another thread may forget it meanwhile
        if size not in pays:
            _, full = _timed(lambda: self.product(hidden))
            found, quick = _timed(lambda: _likeliest(screen, hidden))
            if found is None:
                return True  # counts as a miss
            pays[size] = quick < full
        return pays[size]


def _likeliest(screen: Screen, hidden: Tensor) -> Tensor | None:
    screened = screen(hidden)
    return None if screened is None else screened.likeliest()


def _timed(work: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, and the fastest of a few tries in seconds."""
    seconds = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - start)
    return found, min(seconds)
