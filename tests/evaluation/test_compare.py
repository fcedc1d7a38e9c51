"""The bootstrap intervals: against the normal approximation, and by how often they hold the truth."""

from __future__ import annotations

import numpy as np
import pytest

from minite.evaluation.compare import interval, paired_difference


def test_interval_of_many_values_is_the_normal_one():
    values = np.random.default_rng(0).normal(3.0, 2.0, 400)
    half = 1.96 * values.std() / 400**0.5
    low, high = interval(values)
    assert (low, high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.05 * half * 2)
    assert interval(values) == (low, high)  # the seed is fixed


def test_equal_values_leave_no_doubt():
    assert interval([2.5] * 7) == pytest.approx((2.5, 2.5))
    assert interval([2.5]) == (2.5, 2.5)


def test_interval_holds_the_truth_as_often_as_it_says():
    """STATS: 400 experiments of 40 skewed values; 95 % +- 4 sigma of 1.1 %, and the bootstrap is 1 to 2 % short."""
    rng = np.random.default_rng(1)
    held = [low < 1.0 < high for low, high in (interval(rng.exponential(1.0, 40)) for _ in range(400))]
    assert 0.89 < np.mean(held) < 0.99


def test_pairing_removes_what_items_share():
    rng = np.random.default_rng(2)
    hard = rng.normal(0, 5, 50)
    base, value = hard, hard + 0.1 + rng.normal(0, 0.05, 50)
    difference, (low, high) = paired_difference(value, base)
    assert difference == pytest.approx(np.mean(value - base)) and 0.08 < low < difference < high < 0.12
    apart = interval(value)
    assert apart[1] - apart[0] > 20 * (high - low)
    with pytest.raises(ValueError, match="zip"):
        paired_difference(value, base[:-1])
