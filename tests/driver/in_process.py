"""Learner and samplers of a run in the test's own process: what Ray's actors hold, called directly."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from minite.config import PrecisionPlan, RunConfig, resolve_plan
from minite.driver.actors import _Learner
from minite.driver.job import Job
from minite.driver.loop import Run
from minite.driver.metrics import MetricsWriter
from minite.driver.samplers import Share, _Sampler
from minite.ports import free_port
from minite.sampler.engine import Completion, Request, update_weights
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
        if self._actor.worker is not None:
            self._actor.worker.close()


class Samplers:
    """Engines with the methods of `SamplerPool`, each in a thread that does one call after the other, as an actor does.
    ``spoil`` may change what they sampled."""

    def __init__(self, config: RunConfig, seconds: float = 0.0) -> None:
        """``seconds``: what each call to sample takes more."""
        self._config, self._seconds, self._step = config, seconds, 0
        self._actors = [_Sampler() for _ in range(config.sampler.count)]
        self._threads = [ThreadPoolExecutor(1) for _ in self._actors]
        self.spoil: Callable[[list[Completion]], None] = lambda completions: None

    def use_plan(self, plan: PrecisionPlan) -> None:
        for actor in self._actors:
            actor.setup(self._config, plan, 1)

    def update(self, buckets: Any, version: WeightVersion) -> dict[str, float]:
        pairs = zip(self._threads, self._actors, strict=True)
        calls = [thread.submit(update_weights, actor.engine, buckets, version) for thread, actor in pairs]
        for call in calls:
            call.result()
        self._step = version.step
        return {}

    def submit(self, groups: Sequence[list[Request]]) -> list[Share]:
        def generate(actor: _Sampler, requests: list[Request]) -> list[Completion]:
            time.sleep(self._seconds)
            return actor.generate(requests)

        shares = []
        for i, (thread, actor) in enumerate(zip(self._threads, self._actors, strict=True)):
            requests = [request for group in groups[i :: len(self._actors)] for request in group]
            if requests:
                shares.append(Share(i, requests, None, thread.submit(generate, actor, requests), self._step))
        return shares

    def collect(self, shares: list[Share]) -> list[Completion]:
        done = sorted((c for share in shares for c in share.ref.result()), key=lambda c: c.request_id)
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
