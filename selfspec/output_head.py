"""The target's output head for a few rows at a time, on CPUs where the usual matrix product is slow.

Verifying n nodes multiplies n hidden states with the output head. In float32 BLAS libraries treat `hidden @ W.T` for a
few rows very differently from `W @ hidden.T`, which is the same product (measured on an AMD EPYC without AVX-512,
[262144, 640], two threads, 4 rows: 120 ms against 33 ms; one row: 45 ms). Which one is faster is measured once.

Letters: K rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_MOST_ROWS = 64
_PROBE_ROWS = 4
_TIMES = 3


def by_rows(hidden: Tensor, weight: Tensor) -> Tensor:
    """`[K, D]`, `[V, D]` to `[K, V]` as a linear layer does it."""
    return F.linear(hidden, weight)


def by_columns(hidden: Tensor, weight: Tensor) -> Tensor:
    """The same product, computed as its transpose."""
    return torch.mm(weight, hidden.t()).t().contiguous()


class FewRowsHead:
    """Chooses between the two forms of the product for a given weight by timing them.

    Args:
        weight: `[V, D]` float32 on the CPU, by reference.
        bias: `[V]` or None.

    `trusted` says that the result was compared with the model's own logits.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias
        self.trusted = False
        self._few: Callable[[Tensor, Tensor], Tensor] | None = None

    @staticmethod
    def applies(weight: Tensor | None) -> bool:
        """Whether there is a choice: float32 in main memory."""
        return weight is not None and weight.device.type == "cpu" and weight.dtype == torch.float32

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[B, N, D]` to raw logits `[B, N, V]`."""
        rows = hidden.flatten(0, 1)
        product = self._product(rows.shape[0])(rows, self.weight)
        product = product if self.bias is None else product + self.bias
        return product.unflatten(0, hidden.shape[:2])

    def _product(self, rows: int) -> Callable[[Tensor, Tensor], Tensor]:
        if not 1 < rows <= _MOST_ROWS:
            return by_rows
        if self._few is None:
            probe = torch.ones(_PROBE_ROWS, self.weight.shape[1])
            self._few = min((by_rows, by_columns), key=lambda form: _fastest(form, probe, self.weight))
        return self._few


def _fastest(form: Callable[[Tensor, Tensor], Tensor], hidden: Tensor, weight: Tensor) -> float:
    form(hidden, weight)
    seconds = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        form(hidden, weight)
        seconds.append(time.perf_counter() - start)
    return min(seconds)
