"""The target's output head for a few rows at a time, on CPUs, where it takes most of a pass.

Verifying n nodes multiplies n hidden states with the output head. In float32 BLAS libraries treat `hidden @ W.T` for a
few rows very differently from `W @ hidden.T`, which is the same product (measured on an AMD EPYC without AVX-512,
[262144, 640], two threads, 4 rows: 120 ms against 33 ms; one row: 45 ms). Which is faster is found out in use. Where
only the likeliest token is wanted, most of the product can be left out (see `selfspec.likeliest`).

Letters: K rows, D hidden size, V vocabulary.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from selfspec.few_rows import Contest, Product, by_columns, by_fours, by_rows
from selfspec.likeliest import Likeliest
from selfspec.screen import Screen, Screened

_MOST_ROWS = 64
_FORMS = (by_rows, by_columns, by_fours)
"""Rows of a product that is left as its transpose are read one by one; turning 8 rows of 262,144 round takes 3 ms."""

_NEAR, _NEAR_AT_MOST = 1000, 2.0**-6
"""How far two forms of one product may be apart: so many roundings, or two of bfloat16."""


def same_product(found: Tensor, wanted: Tensor) -> bool:
    """Whether two tensors of one dtype are forms of one product; never where `wanted` holds NaN."""
    largest = float(wanted.abs().max())
    near = min(_NEAR * torch.finfo(wanted.dtype).eps, _NEAR_AT_MOST)
    return largest >= 0 and torch.allclose(found.float(), wanted.float(), rtol=near, atol=near * largest)


class FewRowsHead:
    """Chooses between forms of the product for a given weight by timing them, for each number of rows.

    Args:
        weight: `[V, D]` on the CPU, by reference.
        bias: `[V]` or None.
        screened: whether `likeliest` may be asked.

    `trusted` says that the result was compared with the model's own logits.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, screened: bool = False) -> None:
        self.weight = weight
        self.bias = bias
        self.trusted = False
        self._contests: dict[int, Contest] = {}
        self._likeliest = Likeliest(weight, bias, self._rows) if screened else None

    @staticmethod
    def applies(weight: Tensor | None) -> bool:
        """Whether there is a choice: float32 in main memory, or a weight that can be screened."""
        if weight is None or weight.device.type != "cpu":
            return False
        return weight.dtype == torch.float32 or Screen.applies(weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """`[B, N, D]` to raw logits `[B, N, V]`."""
        start = time.perf_counter()
        logits = self._rows(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        if self._likeliest is not None:
            self._likeliest.spent(time.perf_counter() - start)
        return logits

    def likeliest(self, hidden: Tensor) -> Tensor | None:
        """`[B, N, D]` to the tokens `[B, N]` with the largest raw logits; None where the full product has to tell."""
        found = None if self._likeliest is None else self._likeliest(hidden.flatten(0, 1))
        return None if found is None else found.view(hidden.shape[:2])

    def screened(self, hidden: Tensor, many: bool = False) -> Screened | None:
        """`[B, N, D]` to scores of all `B * N` rows, from which tokens can be drawn; None where there are none.

        `many` asks for them however many rows there are.
        """
        return None if self._likeliest is None else self._likeliest.screened(hidden.flatten(0, 1), many)

    @property
    def screens(self) -> bool:
        """Whether `likeliest` can come to answer."""
        return self._likeliest is not None and not self._likeliest.useless

    @property
    def draws(self) -> bool:
        """Whether `screened` can come to answer."""
        return self._likeliest is not None and self._likeliest.draws

    def begin(self) -> None:
        """A text begins, before which the weight may have changed."""
        if self._likeliest is not None:
            self._likeliest.begin()

    def prepare(self) -> None:
        """Let `likeliest` answer from now on, wherever that is faster."""
        if self._likeliest is not None:
            self._likeliest.prepare()

    def _rows(self, rows: Tensor) -> Tensor:
        """`[K, D]` to `[K, V]`."""
        product = self._product(rows.shape[0])(rows, self.weight)
        return product if self.bias is None else product + self.bias

    def _product(self, rows: int) -> Product:
        if rows > _MOST_ROWS or self.weight.dtype != torch.float32:
            return by_rows
        return self._contests.setdefault(rows, Contest(_FORMS))
