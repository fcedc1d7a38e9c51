"""Ticks, ranges, number texts and the thinning of long curves."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minite.diagnostics.scales import BUCKETS, drawn_steps, number_text, round_ticks, split, value_range


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.lists(st.floats(-1e300, 1e300), min_size=1, max_size=5))
def test_a_range_holds_its_values_and_has_ticks(values):
    low, high = value_range(values)
    assert low <= min(values) and max(values) <= high and low < high
    ticks = round_ticks(low, high)
    assert 1 <= len(ticks) <= 7
    slack = 1e-6 * (high - low)
    assert all(low - slack <= tick <= high + slack for tick in ticks)


def test_ticks_are_round():
    assert round_ticks(0, 1) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])
    assert round_ticks(-0.07, 1.05) == pytest.approx([0, 0.25, 0.5, 0.75, 1.0])
    assert round_ticks(3, 5003, 8) == [1000, 2000, 3000, 4000, 5000]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0.1, 1.0], (0.0, 1.045)),  # zero is near
        ([-1.0, -0.1], (-1.045, 0.0)),
        ([0.9, 1.0], (0.895, 1.005)),  # zero is far
        ([0.0, 0.0], (0.0, 1.0)),
        ([2.0], (1.8, 2.2)),
        ([], (-0.0, 1.05)),
    ],
)
def test_ranges(values, expected):
    assert value_range(values) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (0.0123456, "0.01235"), (1.23e-9, "1.2e-09"), (33540.4, "33540"), (2.5e7, "2.5e+07"), (-0.5, "-0.5"),
     (math.nan, "not finite"), (math.inf, "not finite")],
)  # fmt: skip
def test_number_texts(value, text):
    assert number_text(value) == text


def test_split_covers_every_step_once():
    for count in (BUCKETS, BUCKETS + 1, 5000):
        assert [step for bucket in split(range(count)) for step in bucket] == list(range(count))


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 10_000))
def test_thinning_keeps_ends_and_extremes(seed):
    steps = list(range(10, 1510))
    curve = {step: math.sin(step * (seed + 1.7)) for step in steps if step % 3}
    drawn = drawn_steps(steps, [curve])
    assert len(drawn) <= 4 * BUCKETS
    assert {10, 1508, max(curve, key=curve.__getitem__), min(curve, key=curve.__getitem__)} <= set(drawn)
    assert drawn_steps(steps[:100], [curve]) == [step for step in steps[:100] if step % 3]
