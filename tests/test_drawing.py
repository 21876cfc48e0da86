"""Draws by inversion of the CDF, against exact sums."""

from __future__ import annotations

from fractions import Fraction
from itertools import accumulate

import pytest
import torch
from scipy import stats

from selfspec.drawing import NO_TOKEN, draw
from selfspec.walk import TorchChance


def exact(probs: torch.Tensor, uniform: float) -> int:
    """The first token whose exact running sum is above the number, in rational arithmetic."""
    weights = [Fraction(p) for p in probs.tolist()]
    at = Fraction(uniform) * sum(weights)
    return next(i for i, upto in enumerate(accumulate(weights)) if upto > at)


@pytest.mark.parametrize("size", [1, 2, 97, 511, 512, 513, 1024, 5000])
def test_the_token_is_where_the_exact_running_sum_passes_the_number(size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    probs = (3 * torch.randn(8, size, generator=generator)).softmax(-1)
    probs[3:, ::2] *= torch.rand(5, 1, generator=generator) > 0.5  # zeros, and sums other than 1
    probs[:, -1] += 1e-6
    uniform = torch.rand(8, generator=generator, dtype=torch.float64)
    found = draw(probs, uniform).tolist()
    assert found == [exact(row, number) for row, number in zip(probs, uniform.tolist(), strict=True)]


def test_tokens_without_probability_are_never_drawn_not_even_at_the_ends() -> None:
    probs = torch.zeros(6, 2000)
    probs[:, 700], probs[:, 1300] = 0.25, 0.5
    edges = torch.tensor([0.0, 1 / 3 - 1e-12, 1 / 3 + 1e-9, 1 - 2**-53, 0.5, 5e-324], dtype=torch.float64)
    assert draw(probs, edges).tolist() == [700, 700, 1300, 1300, 1300, 700]


@pytest.mark.parametrize("row", [[0.0, 0.0], [float("nan"), 1.0], [float("inf"), 1.0]])
def test_no_token_comes_of_what_is_no_distribution(row: list[float]) -> None:
    assert draw(torch.tensor([row, [0.0, 1.0]]), torch.full((2,), 0.5).double()).tolist() == [NO_TOKEN, 1]


def test_frequencies_over_a_large_vocabulary_are_the_distribution() -> None:
    probs = (2 * torch.randn(3000, generator=torch.Generator().manual_seed(0))).softmax(-1)
    chance = TorchChance(torch.Generator().manual_seed(1), torch.device("cpu"))
    drawn = torch.cat([chance.token(probs.expand(1000, -1)) for _ in range(20)])
    order = probs.argsort(descending=True)
    bins = torch.empty(3000, dtype=torch.long)
    bins[order] = torch.arange(3000).clamp(max=60)
    observed = torch.bincount(bins[drawn], minlength=61).numpy()
    expected = torch.zeros(61).scatter_add_(0, bins, probs).double().numpy()
    assert stats.chisquare(observed, expected / expected.sum() * observed.sum()).pvalue > 1e-3


def test_a_generator_decides_the_draws_and_rows_are_independent() -> None:
    probs = torch.full((4000, 2), 0.5)
    one, same, other = (TorchChance(torch.Generator().manual_seed(s), torch.device("cpu")) for s in (5, 5, 6))
    first = one.token(probs)
    assert torch.equal(first, same.token(probs)) and not torch.equal(first, other.token(probs))
    pairs = torch.bincount(2 * first[::2] + first[1::2], minlength=4).numpy()
    assert stats.chisquare(pairs).pvalue > 1e-3
