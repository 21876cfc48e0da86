"""Linear layers of the target for the few rows of a tree, on CPUs where the usual matrix product is slow for them.

In float32, BLAS libraries take nearly twice as long for two to five rows of `x W^T` as for one, though reading W is
what takes the time; the same product as `W x^T`, its columns filled up to a multiple of four, takes little more than
one row (AMD EPYC without AVX-512, one thread, W [2048, 640] out of many, milliseconds for 1, 2, 3, 4, 5 rows: 0.44,
0.80, 1.09, 0.73 and 0.89 against 0.44, 0.49, 0.49, 0.49 and 0.92). Which form is faster is found out in use, for each
shape and number of rows. The two differ in the last bits, as products of different sizes do anyway.

The layers keep their weights; only `forward` is replaced, and does what it did unless a tree is verified in the same
context (a context variable), so that plain passes of the model and of other threads stay as they are.

Letters: K rows, D inputs, O outputs.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

_SMALLEST = 2**17
"""Weights below which a call costs more than the product."""
_MOST_ROWS = 16
_BLOCK = 4
_FEW_TRIES, _TRIES = 3, 8
_CLEARLY = 1.25
"""A form that is so much slower after a few tries is out."""

INSTALLING = threading.Lock()
"""Held while layers are replaced, so that calls that come at once replace them once and know what they replaced."""

_FEW_ROWS: ContextVar[bool] = ContextVar("selfspec_few_rows", default=False)

Product = Callable[[Tensor, Tensor], Tensor]
"""`[K, D]`, `[O, D]` to `[K, O]`."""


def by_rows(x: Tensor, weight: Tensor) -> Tensor:
    """`[K, D]`, `[O, D]` to `[K, O]` as a linear layer does it."""
    return F.linear(x, weight)


def by_columns(x: Tensor, weight: Tensor) -> Tensor:
    """The same product as its transpose, left in that layout."""
    return torch.mm(weight, x.t()).t()


def by_fours(x: Tensor, weight: Tensor) -> Tensor:
    """The same, over columns filled up to a multiple of four."""
    return by_columns(F.pad(x, (0, 0, 0, -len(x) % _BLOCK)), weight)[: len(x)]


def by_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """The same, in the usual layout."""
    return by_fours(x, weight).contiguous()


class Contest:
    """Forms of a product take turns until the fastest one is known.

    Args:
        forms: those that take part, in place of the usual ones.
    """

    forms: tuple[Product, ...] = (by_rows, by_blocks)

    def __init__(self, forms: tuple[Product, ...] | None = None) -> None:
        self._left: dict[Product, list[float]] = {form: [] for form in forms or self.forms}
        self.winner: Product | None = None

    def __call__(self, x: Tensor, weight: Tensor) -> Tensor:
        if self.winner is not None:
            return self.winner(x, weight)
        left = self._left
        form = min(left, key=lambda form: len(left[form]))
        start = time.perf_counter()
        product = form(x, weight)
        left[form].append(time.perf_counter() - start)
        tries = min(map(len, left.values()))
        if tries in (_FEW_TRIES, _TRIES):
            self._drop(left, _CLEARLY if tries == _FEW_TRIES else 1.0)
        return product

    def _drop(self, left: dict[Product, list[float]], factor: float) -> None:
        medians = {form: statistics.median(seconds) for form, seconds in left.items()}
        best = min(medians.values())
        self._left = {form: left[form] for form, median in medians.items() if median <= factor * best}
        if len(self._left) == 1 or factor == 1.0:
            self.winner = min(medians, key=lambda form: medians[form])


class FewRowsForward:
    """Stands in for the `forward` of a linear layer. An object, so that copies of the model copy it whole."""

    def __init__(self, layer: nn.Linear, contests: dict[tuple[int, ...], Contest]) -> None:
        self.layer = layer
        self.contests = contests

    def __call__(self, input: Tensor) -> Tensor:
        layer = self.layer
        rows = input.numel() // layer.in_features
        if not (_FEW_ROWS.get() and 2 <= rows <= _MOST_ROWS and input.dtype == layer.weight.dtype == torch.float32):
            return type(layer).forward(layer, input)
        contest = self.contests.setdefault((rows, *layer.weight.shape), Contest())
        product = contest(input.reshape(rows, -1), layer.weight)
        if layer.bias is not None:
            product = product.add_(layer.bias)
        return product.view(*input.shape[:-1], -1)


class FewRowsLayers:
    """The replaced layers of one model.

    Args:
        modules: those that are large linear layers get the stand-in, unless their `forward` was replaced already.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        contests: dict[tuple[int, ...], Contest] = {}
        self._replaced: list[tuple[nn.Module, FewRowsForward]] = []
        for layer in modules:
            if type(layer) is nn.Linear and "forward" not in vars(layer) and _applies(layer.weight):
                stand_in = FewRowsForward(layer, contests)
                layer.__dict__["forward"] = stand_in
                self._replaced.append((layer, stand_in))

    @contextmanager
    def used(self) -> Iterator[None]:
        """Passes in this block may use other forms of the products."""
        token = _FEW_ROWS.set(True)
        try:
            yield
        finally:
            _FEW_ROWS.reset(token)

    def release(self) -> None:
        """Give the layers their own `forward` again."""
        for layer, stand_in in self._replaced:
            if vars(layer).get("forward") is stand_in:  # else someone wrapped it since: by itself it does nothing
                del layer.__dict__["forward"]
        self._replaced.clear()


def is_own(forward: Any) -> bool:
    """Whether a replaced `forward` is one of these, which change nothing by themselves."""
    return isinstance(forward, FewRowsForward)


def _applies(weight: Tensor) -> bool:
    plain = weight.device.type == "cpu" and weight.dtype == torch.float32
    return plain and type(weight) in (Tensor, nn.Parameter) and weight.numel() >= _SMALLEST
