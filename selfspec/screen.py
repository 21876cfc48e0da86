"""The likeliest token of an output head, exactly, from a copy of its weight in 8 bits and a few rows of the weight.

A pass over few tokens spends most of its time reading the output head W, and greedy decoding wants no more of `W h`
than where it is largest. With W ~ S (a signed byte per weight, one scale per row) and h ~ g (two digits of 7 bits, one
scale per row) the sums in `S g` are sums of integers, so exact, and by Cauchy-Schwarz

    |w_v . h - s_v . g|  <=  |w_v - s_v| |g| + |w_v| |h - g|

for every token v. Only tokens whose score could reach the best one under this bound are computed again from W, in
float64, and rounded to the model's dtype. So the result is the argmax of the model's own logits, up to the rounding in
which two forms of one product differ anyway; of tokens with equal logits the first one wins, as in `argmax`.

Letters: K rows, D hidden size, V vocabulary, Q tokens of one part of it, C candidates.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from selfspec.light import has_kernels, packed

_STEPS = 63
"""Largest digit: products of two neighbours then fit into 16 bits, where some processors add them up."""
_ZERO = 64
_FINE = 2 * _STEPS
"""A second digit counts in steps of 1/126 of the first."""
_PART = 32_768
_WIDEST = 2**17
"""D times 127 * 127 must fit into the 32 bits of a sum."""
_SLACK = 2.0**-16
"""For the rounding of scores and bounds in float32, relative to |w| |h|: a few times 2^-24 each."""
_MOST_CANDIDATES = 512
_SAMPLE = 4096
_DAMPING = 0.05


@dataclass(frozen=True)
class _Part:
    """Q rows of W: the first one's token, packed bytes, `[Q]` float32 |w - s|, and the largest |w|."""

    first: int
    packed: Any
    error: Tensor
    norm: float


class Screen:
    """See the module. Making one takes seconds per billion weights.

    Args:
        weight: `[V, D]` float32 or bfloat16 on the CPU, by reference; the copy takes V * D bytes.
        bias: `[V]` or None, by reference.
        sizes: `[D]` float32, how large the channels of hidden states are, roughly; None takes them for alike.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: Tensor | None = None) -> None:
        self.weight, self.bias = weight.detach(), None if bias is None else bias.detach()
        self._made_of = self._checksum()
        self.balance = _balance(self.weight, sizes)
        with ThreadPoolExecutor(torch.get_num_threads()) as pool:
            self.parts = list(pool.map(self._part, range(0, weight.shape[0], _PART)))
        self.norm = max(part.norm for part in self.parts)

    @staticmethod
    def applies(weight: Tensor | None) -> bool:
        """Whether such a copy can be made and may pay: many tokens, in main memory, and kernels for bytes."""
        return (
            weight is not None
            and weight.device.type == "cpu"
            and weight.dtype in (torch.float32, torch.bfloat16)
            and weight.shape[0] >= _PART
            and weight.shape[1] < _WIDEST
            and _has_kernels()
        )

    @property
    def outdated(self) -> bool:
        """Whether W is not what the copy was made of. Reads all of it, as a pass of the model does."""
        return self._checksum() != self._made_of

    def _checksum(self) -> list[int]:
        """Sums of the bytes as integers, in which the order of adding does not matter."""
        held = [self.weight] if self.bias is None else [self.weight, self.bias]
        return [int(_as_integers(tensor).sum()) for tensor in held]

    def _part(self, first: int) -> _Part:
        rows = self.weight[first : first + _PART].float() / self.balance
        held, rounded = packed(rows)
        return _Part(first, held, (rows - rounded).norm(dim=1), float(rows.norm(dim=1).max()))

    def __call__(self, hidden: Tensor) -> Tensor | None:
        """The likeliest token `[K]` int64 for hidden states `[K, D]`; None where only all the logits can tell."""
        balanced = hidden.float() * self.balance
        largest = balanced.abs().amax(1, keepdim=True)
        if not bool((largest.isfinite() & (largest > 0)).all()):
            return None
        unit = balanced / largest
        digits, left = _digits(unit)
        bias = None if self.bias is None else self.bias.float() / largest
        scores = [self._scores(part, digits, bias) for part in self.parts]
        reached = self._exact(hidden, *self._leaders(scores)).float().unsqueeze(1) / largest
        slack = self.norm * (left + _SLACK * unit.norm(dim=1, keepdim=True))
        slack += reached.abs() * 4 * torch.finfo(self.weight.dtype).eps
        rows, tokens = self._candidates(scores, (unit.norm(dim=1, keepdim=True) + left), reached - slack)
        if len(rows) > _MOST_CANDIDATES * len(unit):
            return None
        return _first_largest(self._exact(hidden, rows, tokens).to(self.weight.dtype), rows, tokens, len(unit))

    def _scores(self, part: _Part, digits: Tensor, bias: Tensor | None) -> Tensor:
        """`[2K, D]` digits to `[K, Q]`."""
        both = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(digits, 1 / _STEPS, _ZERO, part.packed)
        coarse, fine = both.chunk(2)
        scores = coarse.add_(fine, alpha=1 / _FINE)
        return scores if bias is None else scores.add_(bias[:, part.first : part.first + scores.shape[1]])

    def _leaders(self, scores: list[Tensor]) -> tuple[Tensor, Tensor]:
        """Of each row the token with the largest score: `[K]` rows, `[K]` tokens."""
        where = torch.stack([part.amax(1) for part in scores]).argmax(0).tolist()
        tokens = [self.parts[i].first + int(scores[i][row].argmax()) for row, i in enumerate(where)]
        return torch.arange(len(where)), torch.tensor(tokens)

    def _candidates(self, scores: list[Tensor], size: Tensor, least: Tensor) -> tuple[Tensor, Tensor]:
        """Rows and tokens `[C]` each whose logit may be at least `least` `[K, 1]`, in the order of tokens.

        Args:
            scores: `[K, Q]` of each part.
            size: `[K, 1]`, at least |g|.
            least: `[K, 1]`.
        """
        found = []
        for part, here in zip(self.parts, scores, strict=True):
            rows, tokens = torch.addcmul(here, size, part.error).ge_(least).nonzero(as_tuple=True)
            found.append((rows, tokens + part.first))
        return torch.cat([rows for rows, _ in found]), torch.cat([tokens for _, tokens in found])

    def _exact(self, hidden: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """Logits `[C]` float64 of some tokens, each for one row."""
        logits = (self.weight[tokens].double() * hidden[rows].double()).sum(1)
        return logits if self.bias is None else logits + self.bias[tokens]


def _balance(weight: Tensor, sizes: Tensor | None) -> Tensor:
    """`[D]` the factors c: square roots of how large channels of W are over how large those of h are, 1 on average."""
    if sizes is None:
        return torch.ones(weight.shape[1])
    some = weight[:: max(1, len(weight) // _SAMPLE)].float().square().mean(0)
    ratio = _damped(some) / _damped(sizes.square())
    factors: Tensor = ratio.pow(0.25)
    return factors / factors.log().mean().exp() if bool(factors.isfinite().all()) else torch.ones_like(factors)


def _damped(squares: Tensor) -> Tensor:
    """Squared sizes of channels, none of them nearly nothing."""
    return squares + _DAMPING * squares.mean() + torch.finfo(torch.float32).tiny


@cache
def _has_kernels() -> bool:
    return has_kernels() and hasattr(torch.ops.quantized, "linear_with_input_q_dq_qweight_dq_output_fp32")


def _digits(unit: Tensor) -> tuple[Tensor, Tensor]:
    """Numbers `[K, D]` in [-1, 1] as two digits each, `[2K, D]` in steps of 1/63, and what is left over, `[K, 1]`."""
    coarse = (unit * _STEPS).round() / _STEPS
    fine = ((unit - coarse) * _FINE * _STEPS).round() / _STEPS
    left = unit - coarse - fine / _FINE
    return torch.cat([coarse, fine]), left.norm(dim=1, keepdim=True)


def _first_largest(logits: Tensor, rows: Tensor, tokens: Tensor, count: int) -> Tensor:
    """The token with the largest logit of each row, the first of several; candidates come in the order of tokens."""
    table = logits.new_full((count, len(rows)), -torch.inf)
    table[rows, torch.arange(len(rows))] = logits
    return tokens[table.argmax(1)]


def _as_integers(tensor: Tensor) -> Tensor:
    """The bytes of a tensor as int64, or as int16 where they do not fit."""
    flat = tensor.contiguous().view(-1)
    whole = flat.numel() * flat.element_size() % 8 == 0
    return flat.view(torch.int64 if whole else torch.int16)
