"""Confidence intervals by the bootstrap: over items, and paired where two subjects saw the same ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
LEVEL = 0.95


def interval(value_N: Sequence[float], seed: int = 0) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean (Efron and Tibshirani, 1993, chapter 13).

    Items count as independent. A difference of two subjects is examined by passing the N differences: what makes an
    item hard for both cancels.
    """
    values = np.asarray(value_N, dtype=np.float64)
    drawn_RN = np.random.default_rng(seed).integers(0, len(values), (RESAMPLES, len(values)))
    low, high = np.quantile(values[drawn_RN].mean(axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def paired_difference(value_N: Sequence[float], base_N: Sequence[float]) -> tuple[float, tuple[float, float]]:
    """Mean of value - base over the items, and its interval."""
    difference_N = [a - b for a, b in zip(value_N, base_N, strict=True)]
    return sum(difference_N) / len(difference_N), interval(difference_N)
