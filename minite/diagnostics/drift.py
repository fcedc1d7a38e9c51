"""Where a trend broke: a cumulative-sum test against a calm baseline, and the step that fits best as the break.

Shape letter: N values since the baseline began.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

MIN_SPREAD = 0.1  # of a logarithm: a baseline steadier than 10 % must not make 1 % a drift
MAX_SHARE = 0.5  # of the threshold, that one step can add: an outlier alone is no drift
HISTORY = 1024  # values kept to find the break in


class Cusum:
    """One-sided CUSUM test for an upward shift of a series (Page, "Continuous inspection schemes", Biometrika 1954).

    The first ``baseline`` values give mean and standard deviation; from then on

        s <- max(0, s + min(z - slack, threshold / 2)),    z = (value - mean) / deviation,

    and s above ``threshold`` is a drift. Both are in standard deviations. False alarms on noise and the delay
    of planted drifts are in docs/monitoring.md, measured by tests/diagnostics/test_drift.py.
    """

    def __init__(self, baseline: int, slack: float, threshold: float) -> None:
        self._baseline, self._slack, self._threshold = baseline, slack, threshold
        self._steps: list[int] = []
        self._values: list[float] = []
        self._calm: tuple[float, float] | None = None  # mean and deviation; None while the baseline is gathered
        self._sum = 0.0

    @property
    def level(self) -> float:
        """The sum as a share of the threshold: 1 is a drift."""
        return self._sum / self._threshold

    def observe(self, step: int, value: float) -> int | None:
        """Take in the value of a step. Returns the step at which a drift began, when this value shows one.

        After a drift the next value begins a new baseline: what was done about it has changed what is normal.
        A NaN says nothing and is left out; an infinite value counts as far outside.
        """
        if math.isnan(value):
            return None
        if self._calm is None:
            if math.isfinite(value):
                self._keep(step, value)
            if len(self._values) == self._baseline:
                spread = float(np.std(self._values, ddof=1))
                self._calm = float(np.mean(self._values)), max(spread, MIN_SPREAD)
            return None
        mean, spread = self._calm
        most = MAX_SHARE * self._threshold
        self._keep(step, min(value, mean + (self._slack + most) * spread))
        self._sum = max(0.0, self._sum + min((value - mean) / spread - self._slack, most))
        if self._sum <= self._threshold:
            return None
        began = self._steps[break_index(self._values)]
        self.__init__(self._baseline, self._slack, self._threshold)  # type: ignore[misc]
        return began

    def _keep(self, step: int, value: float) -> None:
        self._steps.append(step)
        self._values.append(value)
        del self._steps[:-HISTORY], self._values[:-HISTORY]

    def state_dict(self) -> dict[str, Any]:
        calm = None if self._calm is None else list(self._calm)
        return {"steps": list(self._steps), "values": list(self._values), "calm": calm, "sum": self._sum}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._steps, self._values, self._sum = list(state["steps"]), list(state["values"]), state["sum"]
        self._calm = None if state["calm"] is None else (state["calm"][0], state["calm"][1])


def break_index(value_N: list[float]) -> int:
    """Index of the first value that belongs to the drift, by least squares.

    Two shapes are tried at every index: a level that jumps, and a level that begins to rise in a straight line. The
    smallest sum of squared residuals wins (Hinkley, "Inference about the change-point in a sequence of random
    variables", Biometrika 1970, for the jump). Needs at least 2 values.
    """
    y_N = np.asarray(value_N, dtype=np.float64)
    t_N = np.arange(len(y_N))
    best, found = math.inf, 1
    for i in range(1, len(y_N)):
        for shape_N in ((t_N >= i).astype(np.float64), np.maximum(t_N - i + 1.0, 0.0)):
            centered_N = shape_N - shape_N.mean()
            slope = (centered_N @ y_N) / (centered_N @ centered_N)
            if slope > 0:
                left = float(np.square(y_N - y_N.mean() - slope * centered_N).sum())
                if left < best:
                    best, found = left, i
    return found
