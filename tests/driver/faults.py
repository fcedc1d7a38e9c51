"""Faults for a run inside a test's process: each happens once, at a step, in the middle of what the step does."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from minite.driver.actors import LearnerGroup
from minite.driver.loop import Run
from minite.driver.samplers import SamplerPool
from minite.errors import DiskError

Fault = Callable[[Run], None]


def kill_sampler(run: Run) -> None:
    os.kill(run.samplers._processes[0].pid, signal.SIGKILL)


def hang_sampler(run: Run) -> None:
    """It is waited for a second; its successor, which a busy machine starts slowly, as long as the recipe says."""
    pool, patience, replace = run.samplers, run.samplers._timeout, run.samplers._replace

    def patiently(*args: Any) -> None:
        pool._timeout = patience
        replace(*args)

    pool._timeout, pool._replace = 1.0, patiently
    os.kill(pool._processes[0].pid, signal.SIGSTOP)


def kill_learner(run: Run) -> None:
    os.kill(run.learners._processes[0].pid, signal.SIGKILL)


def at_steps(patch: Any, faults: dict[tuple[str, int], Fault]) -> list[tuple[str, int]]:
    """Before the given call of the given step (counted from 1) something happens, once. Returns what has happened.

    Calls: submit and update of the samplers, train_step and save of the learner.
    """
    happened: list[tuple[str, int]] = []
    current: list[Run] = []
    original_step = Run.train_step

    def train_step(self: Run) -> None:
        current[:] = [self]
        original_step(self)

    def hook(owner: type, name: str) -> None:
        original = getattr(owner, name)

        def call(self: Any, *args: Any) -> Any:
            step = current[0].step + (name in ("submit", "train_step")) if current else 0
            result = original(self, *args) if name == "submit" else None  # so that it dies at work
            fault = faults.get((name, step))
            if fault is not None and (name, step) not in happened:
                happened.append((name, step))
                fault(current[0])
            return result if name == "submit" else original(self, *args)

        patch.setattr(owner, name, call)

    patch.setattr(Run, "train_step", train_step)
    for owner, name in ((SamplerPool, "submit"), (SamplerPool, "update"), (LearnerGroup, "train_step")):
        hook(owner, name)
    hook(LearnerGroup, "save")
    return happened


def full_disk(run: Run) -> None:
    raise DiskError("No space left on device")
