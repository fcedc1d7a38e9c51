"""The monitor of a run: rolling means of what shows a mismatch, and a drift test on the signals a recipe watches."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from minite.config.schema import MonitorConfig
from minite.diagnostics.drift import Cusum

FLOOR = 1e-4  # of a signal: smaller gaps [nats] and shares change no update, so their noise is no drift

ROLLING = {
    "gap": "gap/abs_mean",
    "tail": "gap/p1",
    "entropy": "entropy/mean",
    "ess": "ratio/ess",
    "router": "router/flip_frac",
}

Value = Callable[[Mapping[str, float]], float]  # from the metrics of a step; larger is worse

# The words of monitor.watch. The test sees the logarithm, so a drift is a factor, whatever the size of the gap.
SIGNALS: dict[str, Value] = {
    "gap": lambda m: m["gap/abs_mean"],
    "tail": lambda m: -m["gap/p1"],
    "ess": lambda m: 1 - m["ratio/ess"],
    "router": lambda m: m["router/flip_frac"],
    "entropy_rise": lambda m: m["entropy/mean"],
    "entropy_fall": lambda m: 1 / max(m["entropy/mean"], FLOOR),
}


@dataclass(frozen=True)
class Drift:
    """A signal has left its baseline."""

    signal: str  # a word of SIGNALS
    step: int  # that showed it
    since: int  # step at which the trend broke

    def __str__(self) -> str:
        return f"step {self.step}: {self.signal} has drifted since step {self.since}"


class Monitor:
    """Takes in the metrics of every step. Its state belongs into the checkpoint."""

    def __init__(self, config: MonitorConfig) -> None:
        self._tests = {name: Cusum(config.baseline, config.slack, config.threshold) for name in config.watch}
        self._recent: dict[str, deque[float]] = {name: deque(maxlen=config.window) for name in ROLLING}

    def observe(self, step: int, metrics: Mapping[str, float]) -> tuple[dict[str, float], Drift | None]:
        """(metrics under their documented keys, the drift that this step shows or None).

        When several signals drift in one step, the one whose trend broke first is told. A signal that a run does not
        have (a router in a dense model) is passed over.
        """
        found: list[Drift] = []
        for name, test in self._tests.items():
            since = test.observe(step, _log(name, metrics))
            if since is not None:
                found.append(Drift(name, step, since))
        drift = min(found, key=lambda d: d.since, default=None)
        level = max((test.level for test in self._tests.values()), default=0.0)
        told = {"monitor/level": 1.0 if drift else level, "monitor/drift": float(drift is not None)}
        for name, key in ROLLING.items():
            value = metrics.get(key, math.nan)
            if math.isfinite(value):
                self._recent[name].append(value)
            if self._recent[name]:
                told[f"monitor/{name}"] = math.fsum(self._recent[name]) / len(self._recent[name])
        return told, drift

    def state_dict(self) -> dict[str, Any]:
        return {
            "tests": {name: test.state_dict() for name, test in self._tests.items()},
            "recent": {name: list(values) for name, values in self._recent.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """A signal that is watched since the resume begins with a baseline of its own."""
        for name, test in self._tests.items():
            if name in state["tests"]:
                test.load_state_dict(state["tests"][name])
        for name, values in state["recent"].items():
            self._recent[name].extend(values)


def _log(name: str, metrics: Mapping[str, float]) -> float:
    """NaN where the run does not have the signal, or it is not a number."""
    try:
        value = SIGNALS[name](metrics)
    except KeyError:
        return math.nan
    return value if math.isnan(value) else math.log(max(value, FLOOR))
