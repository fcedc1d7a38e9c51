"""The monitor of a run and what it does about a drift: warn, lower the learning rate, switch a module group, stop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minite.config import PrecisionPlan, RunConfig
from minite.config.plan_switch import with_bf16_inputs
from minite.diagnostics.monitor import Drift, Monitor
from minite.errors import UserError


class Watch:
    """``plan`` and ``lr_scale`` are what the run obeys after each `observe`. Without ``monitor.watch`` they stay."""

    def __init__(self, config: RunConfig, plan: PrecisionPlan, run_dir: Path, note: Callable[[str], None]) -> None:
        self._config, self._begun, self._run_dir, self._note = config, plan, run_dir, note
        self._monitor = Monitor(config.monitor) if config.monitor.watch else None
        self._switched: list[str] = []  # patterns of monitor.switch in force
        self.plan = plan
        self.lr_scale = 1.0

    def observe(self, step: int, metrics: Mapping[str, float]) -> dict[str, float]:
        """Take in the metrics of a step; returns those of the monitor. Raises UserError where a drift is to stop."""
        if self._monitor is None:
            return {}
        told, drift = self._monitor.observe(step, metrics)
        if drift is not None:
            self._act(drift)
        return told | {"monitor/lr_scale": self.lr_scale, "monitor/switched": float(len(self._switched))}

    def _act(self, drift: Drift) -> None:
        monitor = self._config.monitor
        waiting = [pattern for pattern in monitor.switch if pattern not in self._switched]
        if monitor.on_drift == "stop":
            raise UserError(
                f"{drift}; stopped as monitor.on_drift says. The newest checkpoint is intact: see docs/monitoring.md, "
                f"then 'minite resume {self._run_dir}' with other settings"
            )
        if monitor.on_drift == "lower_lr":
            self.lr_scale *= monitor.lr_factor
            self._note(f"{drift}; the learning rate is now {self.lr_scale:g} of the recipe's")
        elif monitor.on_drift == "switch" and waiting:
            self._switch([*self._switched, waiting[0]])
            self._note(f"{drift}; {waiting[0]} goes to W4A16, the plan is now {self.plan.digest[:12]}")
        else:
            self._note(f"{drift}{'; every group of monitor.switch is switched' if monitor.switch else ''}; going on")

    def _switch(self, patterns: list[str]) -> None:
        self._switched = patterns
        self.plan = with_bf16_inputs(self._config, self._begun, patterns)

    def state_dict(self) -> dict[str, Any]:
        monitor = self._monitor.state_dict() if self._monitor else None
        return {"monitor": monitor, "switched": list(self._switched), "lr_scale": self.lr_scale}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """What was switched and lowered stays so, also when the monitor is off now."""
        self.lr_scale = state["lr_scale"]
        self._switch(state["switched"])
        if self._monitor is not None and state["monitor"] is not None:
            self._monitor.load_state_dict(state["monitor"])


def plan_at(config: RunConfig, begun: PrecisionPlan, state: dict[str, Any]) -> PrecisionPlan:
    """The plan in force in a checkpoint, from its driver state and the plan the run began with."""
    return with_bf16_inputs(config, begun, state["watch"]["switched"])
