"""Learner and samplers of a run in the test's own process: what Ray's actors hold, called directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from minite.config import PrecisionPlan, RunConfig, resolve_plan
from minite.driver.actors import _Learner
from minite.driver.job import Job
from minite.driver.loop import Run
from minite.driver.metrics import MetricsWriter
from minite.driver.ports import free_port
from minite.driver.samplers import Share, _Sampler
from minite.sampler.engine import Completion, Request
from minite.types import WeightVersion


class Learners:
    """One learner rank with the methods of `LearnerGroup`."""

    def __init__(self) -> None:
        self._actor = _Learner()

    @property
    def policy(self) -> Any:
        return self._actor.worker._policy

    def setup(self, config: RunConfig, plan: PrecisionPlan) -> None:
        self._actor.setup(config, plan, 0, 1, free_port(), 1)

    def export(self) -> tuple[Any, WeightVersion, dict[str, float]]:
        return (*self._actor.call("export"), {})

    def __getattr__(self, method: str) -> Callable[..., Any]:
        return lambda *args: self._actor.call(method, *args)

    def close(self) -> None:
        self._actor.worker.close()


class Samplers:
    """Engines with the methods of `SamplerPool`. ``spoil`` may change what they sampled."""

    def __init__(self, config: RunConfig) -> None:
        self._config, self._step = config, 0
        self._actors = [_Sampler() for _ in range(config.sampler.count)]
        self.spoil: Callable[[list[Completion]], None] = lambda completions: None

    def use_plan(self, plan: PrecisionPlan) -> None:
        for actor in self._actors:
            actor.setup(self._config, plan, 1)

    def update(self, buckets: Any, version: WeightVersion) -> dict[str, float]:
        for engine in (actor.engine for actor in self._actors):
            engine.begin_update(version)
            for bucket in buckets:
                engine.load_bucket(bucket)
            engine.finish_update()
        self._step = version.step
        return {}

    def submit(self, groups: Sequence[list[Request]]) -> list[Share]:
        shares = []
        for i, actor in enumerate(self._actors):
            requests = [request for group in groups[i :: len(self._actors)] for request in group]
            if requests:
                shares.append(Share(i, requests, None, actor.generate(requests), self._step))
        return shares

    def collect(self, shares: list[Share]) -> list[Completion]:
        done = sorted((c for share in shares for c in share.ref), key=lambda c: c.request_id)
        if not done[0].request_id.startswith("heldout"):
            self.spoil(done)
        return done


def begin(config: RunConfig, folder: Path, learners: Learners) -> tuple[Run, MetricsWriter]:
    """A run after its first sync."""
    job = Job(config, resolve_plan(config), folder)
    metrics = MetricsWriter(folder, job.view)
    run = Run(job, learners, Samplers(config), metrics)
    run.begin()
    return run, metrics
