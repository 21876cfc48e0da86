"""Tests of counts against exact probabilities, and what they could have seen.

Cells with a small expectation are pooled, as the chi-square approximation wants (Cochran 1954: at least 5 per cell).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from scipy.optimize import brentq
from scipy.stats import chi2, chi2_contingency, ncx2, power_divergence

LEAST = 5.0
_POWER = 0.9


@dataclass(frozen=True)
class Fit:
    """A G-test (likelihood ratio) of counts against probabilities.

    Args:
        statistic: G; chi-square distributed with `freedom` degrees if the probabilities are right.
        freedom: cells after pooling, less one; 0 when one cell holds everything and nothing can be tested.
        p_value: of the statistic.
        distance: total variation between shares and probabilities, before pooling.
        outside: counts where the probability is 0.
    """

    statistic: float
    freedom: int
    p_value: float
    distance: float
    outside: int


def fit(counts: Sequence[int], probabilities: Sequence[float]) -> Fit:
    """Test counts of `len(probabilities)` cells."""
    total = sum(counts)
    outside = sum(count for count, p in zip(counts, probabilities, strict=True) if p <= 0)
    distance = sum(abs(c / total - p) for c, p in zip(counts, probabilities, strict=True)) / 2 if total else 0.0
    inside = [(c, p) for c, p in zip(counts, probabilities, strict=True) if p > 0]
    seen, hoped = _pooled([c for c, _ in inside], [p for _, p in inside], sum(c for c, _ in inside))
    if len(seen) < 2:
        return Fit(0.0, 0, 1.0, distance, outside)
    found = power_divergence(seen, hoped, lambda_="log-likelihood")
    return Fit(float(found.statistic), len(seen) - 1, float(found.pvalue), distance, outside)


def together(fits: Sequence[Fit]) -> float:
    """One p-value over independent tests: the sum of the statistics has the sum of the degrees of freedom."""
    freedom = sum(one.freedom for one in fits)
    return float(chi2.sf(sum(one.statistic for one in fits), freedom)) if freedom else 1.0


def same_source(one: Sequence[int], other: Sequence[int]) -> float:
    """p-value of the hypothesis that two samples of the same size come from one distribution."""
    both = [a + b for a, b in zip(one, other, strict=True)]
    order = sorted(range(len(both)), key=lambda cell: both[cell])
    rows: list[list[float]] = [[], []]
    filled = 2 * LEAST
    for cell in order:
        if filled >= 2 * LEAST:
            rows[0].append(0.0)
            rows[1].append(0.0)
            filled = 0.0
        rows[0][-1] += one[cell]
        rows[1][-1] += other[cell]
        filled += both[cell]
    if len(rows[0]) < 2:
        return 1.0
    return float(chi2_contingency(rows, lambda_="log-likelihood").pvalue)


def detectable(samples: int, freedom: int, alpha: float) -> float | None:
    """The total variation from which on a deviation is seen with 90% odds, wherever it lies.

    A deviation with w^2 = sum (q - p)^2 / p shifts the statistic by n w^2; by Cauchy-Schwarz its total variation is at
    most w / 2, so one of total variation d has w >= 2 d.
    """
    if freedom < 1 or samples < 1:
        return None
    bound = float(chi2.isf(alpha, freedom))
    shift = brentq(lambda x: float(ncx2.sf(bound, freedom, x)) - _POWER, 1e-6, 1e5)
    return float((shift / samples) ** 0.5 / 2)


def _pooled(counts: Sequence[int], probabilities: Sequence[float], total: int) -> tuple[list[float], list[float]]:
    mass = sum(probabilities)
    hoped = [p / mass * total for p in probabilities] if mass else []
    order = sorted(range(len(hoped)), key=lambda cell: hoped[cell])
    seen: list[float] = [0.0]
    wanted: list[float] = [0.0]
    for cell in order:
        if wanted[-1] >= LEAST:
            seen.append(0.0)
            wanted.append(0.0)
        seen[-1] += counts[cell]
        wanted[-1] += hoped[cell]
    if len(wanted) > 1 and wanted[-1] < LEAST:
        last_seen, last_wanted = seen.pop(), wanted.pop()
        seen[-1] += last_seen
        wanted[-1] += last_wanted
    return seen, wanted
