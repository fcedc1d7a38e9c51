"""The drift test on planted drifts and on noise without one. STATS: fixed seeds; figures are in docs/metrics.md."""

from __future__ import annotations

import math

import numpy as np
import pytest

from minite.config.schema import MonitorConfig
from minite.diagnostics.drift import Cusum, break_index

SPREAD = 0.3  # of the logarithm of the gap from step to step; only its being above MIN_SPREAD matters
DEFAULT = MonitorConfig()


def fresh(**changed) -> Cusum:
    settings = {"baseline": DEFAULT.baseline, "slack": DEFAULT.slack, "threshold": DEFAULT.threshold} | changed
    return Cusum(**settings)


def first_drift(values, test: Cusum) -> tuple[int, int] | None:
    """(step that shows it, step named) of the first drift."""
    for step, value in enumerate(values):
        if (since := test.observe(step, value)) is not None:
            return step, since
    return None


def noise(kind: str, n: int, rng) -> np.ndarray:
    """Stationary, of unit standard deviation where it has one."""
    if kind == "t3":
        return rng.standard_t(3, n)
    e = rng.normal(0, 1, n)
    if kind == "ar":  # each step remembers half of the one before
        for i in range(1, n):
            e[i] = 0.5 * e[i - 1] + math.sqrt(0.75) * e[i]
    return e


# Of 100,000 steps each, measured: normal 0, Student's t with 3 degrees of freedom 2, autoregressive 0.5 23.
@pytest.mark.parametrize(("kind", "most"), [("normal", 3), ("t3", 12), ("ar", 60)])
def test_false_alarms_on_stationary_noise_are_rare(kind, most):
    rng, alarms = np.random.default_rng(0), 0
    for _ in range(100):
        test = fresh()
        alarms += sum(test.observe(i, SPREAD * x) is not None for i, x in enumerate(noise(kind, 1000, rng)))
    assert alarms <= most


@pytest.mark.parametrize("sizes", [3, 5])
def test_a_jump_is_seen_within_steps_and_named(sizes):
    rng, at, late, off = np.random.default_rng(sizes), 60, [], []
    for _ in range(100):
        values = SPREAD * (noise("normal", 120, rng) + sizes * (np.arange(120) >= at))
        shown, named = first_drift(values, fresh())
        late.append(shown - at)
        off.append(abs(named - at))
    assert np.quantile(late, 0.95) <= {3: 14, 5: 4}[sizes]
    assert np.median(off) == 0 and np.quantile(off, 0.9) <= 2


def test_a_slow_rise_is_named_near_its_start():
    rng, at, off = np.random.default_rng(1), 60, []
    for _ in range(100):
        values = SPREAD * (noise("normal", 400, rng) + 0.1 * np.maximum(np.arange(400) - at + 1, 0))
        shown, named = first_drift(values, fresh())
        off.append(abs(named - at))
    assert np.median(off) <= 6 and np.quantile(off, 0.9) <= 14


def test_an_outlier_alone_is_no_drift_and_two_are():
    calm = [SPREAD * (-1) ** i for i in range(40)]
    assert first_drift([*calm, 1e6, *calm], fresh()) is None
    assert first_drift([*calm, math.inf, *calm], fresh()) is None
    assert first_drift([*calm, 1e6, 1e6, 1e6, *calm], fresh()) == (42, 40)


def test_a_falling_series_and_nan_are_no_drift():
    calm = [SPREAD * (-1) ** i for i in range(30)]
    assert first_drift([*calm, *[-5.0] * 50], fresh()) is None
    assert first_drift([*calm, *[math.nan] * 50], fresh()) is None


def test_the_sum_by_hand():
    test = fresh(baseline=5, slack=1.0, threshold=8.0)
    for i, value in enumerate((1.0, 3.0, 2.0, 1.0, 3.0)):  # mean 2, deviation 1
        assert test.observe(i, value) is None
    sums = []
    for i, value in enumerate((2.5, 5.0, 4.0, 1.0, 9.0), 5):
        assert test.observe(i, value) is None
        sums.append(8 * test.level)
    assert sums == pytest.approx([0, 2, 3, 1, 5])  # the last excess is 6, of which 4 count
    assert test.observe(10, 9.0) == 9 and test.level == 0


def test_break_index_of_shapes_without_noise():
    assert break_index([0.0] * 7 + [1.0] * 3) == 7
    assert break_index([0.0] * 10 + [0.5, 1.0, 1.5, 2.0]) == 10
    assert break_index([0.0, 1.0]) == 1


def test_state_survives_at_every_step():
    rng = np.random.default_rng(2)
    values = SPREAD * (noise("normal", 90, rng) + 3 * (np.arange(90) >= 50))
    whole = fresh()
    straight = [whole.observe(i, value) for i, value in enumerate(values)]
    test, resumed = fresh(), []
    for i, value in enumerate(values):
        resumed.append(test.observe(i, value))
        state, test = test.state_dict(), fresh()
        test.load_state_dict(state)
    assert resumed == straight and any(since is not None for since in straight)
