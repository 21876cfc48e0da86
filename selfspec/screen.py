"""The likeliest token of an output head, or one drawn from it, exactly, from a copy of its weight in 8 bits.

A pass over few tokens spends most of its time reading the output head W, and decoding wants no more of `W h` than where
it is largest, or one token drawn from its softmax. With W ~ S (a signed byte per weight, one scale per row) and h ~ g
(two digits of 7 bits, one scale per row) the sums in `S g` are sums of integers, so exact, and by Cauchy-Schwarz

    |w_v . h - s_v . g|  <=  |w_v - s_v| |g| + |w_v| |h - g|

for every token v. Only tokens whose score could reach the best one under this bound are computed again from W, in
float64, and rounded to the model's dtype. So the result is the argmax of the model's own logits, up to the rounding in
which two forms of one product differ anyway; of tokens with equal logits the first one wins, as in `argmax`. A draw
proposes tokens by the bound and refuses some of them by their exact logit.

Some channels of h are a hundred times larger than others, which would leave little of a byte for the others. So, as in
SmoothQuant (Xiao et al. 2023, equation 4), channel j of h is multiplied by c_j and that of W divided by it: W h stays
what it was, and there are fewer candidates.

Letters: K rows, D hidden size, V vocabulary, Q tokens of one part of it, C candidates.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from selfspec.drawing import draw_often
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
_PROPOSALS, _MOST_TRIES, _KNOWN = 32, 4, 128
_FEW = 8
_SAMPLE = 4096
_WHOLE_ROWS = 64
_DAMPING = 0.05

Finish = Callable[[Tensor], Tensor]
"""Values of an output head to logits, each by itself and in the dtype it has."""


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
        self._weight, self._bias = weight, bias
        self._made_of = self._marks()
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
    def weight(self) -> Tensor:
        """W as it is now: a parameter may be given other storage (`.data = `, `model.to`)."""
        return self._weight.detach()

    @property
    def bias(self) -> Tensor | None:
        """`[V]` or None, as it is now."""
        return None if self._bias is None else self._bias.detach()

    @property
    def outdated(self) -> bool:
        """Whether W is not what the copy was made of. Reads all of it, as a pass of the model does.

        Tensors count the changes made to them, but not those through `.data`, as merging an adapter or filling in the
        row of a new token often is.
        """
        pairs = zip(self._marks(), self._made_of, strict=True)
        return not all(torch.equal(now, before) for now, before in pairs)

    def _marks(self) -> list[Tensor]:
        """What changes with the weights: `[V]` sums of the bytes of each row, and some rows as they are.

        The sums are of integers, so the order of adding does not matter; nor does that of the columns, hence the rows.
        """
        bias = self.bias
        held = [self.weight] if bias is None else [self.weight, bias.unsqueeze(1)]
        some = self.weight[:: max(1, len(self.weight) // _WHOLE_ROWS)].clone()
        return [*(_as_integers(tensor).sum(1) for tensor in held), _as_integers(some)]

    def _part(self, first: int) -> _Part:
        rows = self.weight[first : first + _PART].float() / self.balance
        held, rounded = packed(rows)
        return _Part(first, held, (rows - rounded).norm(dim=1), float(rows.norm(dim=1).max()))

    def __call__(self, hidden: Tensor) -> Screened | None:
        """Scores for hidden states `[K, D]`, with their bounds; None where only all the logits can tell."""
        balanced = hidden.float() * self.balance
        largest = balanced.abs().amax(1, keepdim=True)
        if not bool((largest.isfinite() & (largest > 0)).all()):
            return None
        unit = balanced / largest
        digits, left = _digits(unit)
        bias = None if self.bias is None else self.bias.float() / largest
        size = unit.norm(dim=1, keepdim=True)
        scores = [self._scores(part, digits, bias) for part in self.parts]
        return Screened(self, hidden, largest, scores, size + left, self.norm * (left + _SLACK * size))

    def _scores(self, part: _Part, digits: Tensor, bias: Tensor | None) -> Tensor:
        """`[2K, D]` digits to `[K, Q]`."""
        both = torch.ops.quantized.linear_with_input_q_dq_qweight_dq_output_fp32(digits, 1 / _STEPS, _ZERO, part.packed)
        coarse, fine = both.chunk(2)
        scores = coarse.add_(fine, alpha=1 / _FINE)
        return scores if bias is None else scores.add_(bias[:, part.first : part.first + scores.shape[1]])

    def exact(self, hidden: Tensor, rows: Tensor, tokens: Tensor) -> Tensor:
        """Logits `[C]` float64 of some tokens, each for one row."""
        logits = (self.weight[tokens].double() * hidden[rows].double()).sum(1)
        return logits if self.bias is None else logits + self.bias[tokens]


@dataclass(frozen=True, eq=False)
class Screened:
    """Scores of K hidden states, and how far the logits may be from them: |logit - score| <= size * error + slack.

    All but `hidden` is in units of each row's `largest`, which leaves the order of tokens as it is.

    Args:
        screen: made them.
        hidden: `[K, D]`.
        largest: `[K, 1]`, one unit.
        scores: `[K, Q]` of each part.
        size: `[K, 1]`, at least |g|.
        slack: `[K, 1]`.
    """

    screen: Screen
    hidden: Tensor
    largest: Tensor
    scores: list[Tensor]
    size: Tensor
    slack: Tensor

    def likeliest(self) -> Tensor | None:
        """The tokens `[K]` int64 with the largest logits; None where there are too many candidates."""
        rows, tokens = self._leaders()
        reached = self.screen.exact(self.hidden, rows, tokens).float().unsqueeze(1) / self.largest
        rounding = reached.abs() * 4 * torch.finfo(self.hidden.dtype).eps
        rows, tokens = self._candidates(reached - self.slack - rounding)
        if len(rows) > _MOST_CANDIDATES * len(self.hidden):
            return None
        logits = self.screen.exact(self.hidden, rows, tokens).to(self.hidden.dtype)
        return _first_largest(logits, rows, tokens, len(self.hidden))

    def draw(
        self, row: int, temperature: float, numbers: Callable[[int], Tensor], finish: Finish = torch.positive
    ) -> int | None:
        """A token drawn from softmax(logits / temperature) of a row, by rejection (von Neumann 1951).

        With u the largest that logits can be by the bound, a token proposed from softmax(u / temperature) is taken with
        chance exp((logit - u) / temperature), so its own logit is all that is computed exactly. Those of the likeliest
        tokens are computed beforehand and stand for u, which leaves few refusals.

        Args:
            row: of K.
            temperature: above 0.
            numbers: gives so many uniform numbers, `[count]` float64.
            finish: what the model makes of the output head's values; keeps their order.

        Returns:
            None after many refusals. What was refused says nothing about a draw made in another way then.
        """
        upper = self._most(row, finish)
        known = upper.topk(_KNOWN).indices
        upper[known] = self._exact(row, known, finish)
        weights = ((upper - upper.max()) / temperature).exp_()
        for _ in range(_MOST_TRIES):
            places, coins = numbers(2 * _PROPOSALS).chunk(2)
            proposed = draw_often(weights, places)
            short = (self._exact(row, proposed, finish) - upper[proposed]) / temperature
            taken = (coins < short.exp()).nonzero()
            if len(taken):
                return int(proposed[taken[0, 0]])
        return None

    def _most(self, row: int, finish: Finish = torch.positive) -> Tensor:
        """`[V]` float32, what the logits of a row are at most, as the model's dtype holds them."""
        parts = zip(self.screen.parts, self.scores, strict=True)
        most = torch.cat([torch.add(here[row], part.error, alpha=float(self.size[row])) for part, here in parts])
        most = finish(most.add_(self.slack[row]).mul_(self.largest[row]))
        return most.add(most.abs(), alpha=2 * torch.finfo(self.hidden.dtype).eps)

    def _exact(self, row: int, tokens: Tensor, finish: Finish) -> Tensor:
        """Logits `[C]` float32 of some tokens of a row, as the model's dtype holds them."""
        raw = self.screen.exact(self.hidden, torch.full_like(tokens, row), tokens)
        return finish(raw.to(self.hidden.dtype)).float()

    def top(self, row: int, count: int, finish: Finish = torch.positive) -> tuple[Tensor, Tensor] | None:
        """Tokens `[C]` of a row, ascending, with their logits `[C]` float32; no other is among the `count` largest.

        None where there are too many.
        """
        at_least = []
        for part, here in zip(self.screen.parts, self.scores, strict=True):
            lowest = torch.sub(here[row], part.error, alpha=float(self.size[row]))
            at_least.append(lowest.topk(min(count, lowest.numel())).values)
        every = torch.cat(at_least)
        least = every.topk(min(count, every.numel())).values[-1] - 2 * self.slack[row]
        least = least - least.abs() * 4 * torch.finfo(self.hidden.dtype).eps
        _, tokens = self._candidates(least.view(1, 1), slice(row, row + 1))
        if len(tokens) > _MOST_CANDIDATES * max(count, _FEW):
            return None
        return tokens, self._exact(row, tokens, finish)

    def holds(self, logits: Tensor) -> bool:
        """Whether logits `[K, V]` of the full product lie within the bounds, up to their own rounding."""
        rounding = 64 * torch.finfo(logits.dtype).eps * logits.abs().amax(1, keepdim=True)
        missed = (logits.float() - torch.cat(self.scores, 1) * self.largest).abs()
        bound = torch.cat([part.error for part in self.screen.parts]) * self.size + self.slack
        return bool((missed <= bound * self.largest + rounding).all())

    def _leaders(self) -> tuple[Tensor, Tensor]:
        """Of each row the token with the largest score: `[K]` rows, `[K]` tokens."""
        where = torch.stack([part.amax(1) for part in self.scores]).argmax(0).tolist()
        tokens = [self.screen.parts[i].first + int(self.scores[i][row].argmax()) for row, i in enumerate(where)]
        return torch.arange(len(where)), torch.tensor(tokens)

    def _candidates(self, least: Tensor, rows: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """Rows and tokens `[C]` each whose logit may be `least` `[K, 1]`, less the slack, in the order of tokens."""
        found = []
        for part, here in zip(self.screen.parts, self.scores, strict=True):
            of, tokens = torch.addcmul(here[rows], self.size[rows], part.error).ge_(least).nonzero(as_tuple=True)
            found.append((of, tokens + part.first))
        return torch.cat([of for of, _ in found]), torch.cat([tokens for _, tokens in found])


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
    """The bytes of each row of a matrix as int64, or as int16 where they do not fit."""
    rows, size = tensor.contiguous(), tensor.element_size()
    whole = rows.shape[1] * size % 8 == 0 and rows.storage_offset() * size % 8 == 0
    return rows.view(torch.int64 if whole else torch.int16)
