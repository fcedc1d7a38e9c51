"""All samplers as Ray actors behind plain method calls. One that dies or hangs is replaced and its work done again.

Request seeds depend on the run, the prompt and the sample only: in strict mode a redone request gets the same tokens.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import ray
import torch

from minite.config import PrecisionPlan, RunConfig
from minite.driver.actors import Exported, Lost, answers, end, named_numbers, processes, sharing
from minite.driver.cluster import Slot
from minite.driver.recovery import Recovery
from minite.errors import ProcessDied
from minite.sampler.engine import Completion, Request, update_weights
from minite.sync.clock import Clock
from minite.sync.errors import SyncError
from minite.sync.flat import unflatten
from minite.types import WeightVersion


class _Sampler:
    """One sampler engine."""

    engine: Any = None

    def pid(self) -> int:
        return os.getpid()

    def setup(self, config: RunConfig, plan: PrecisionPlan, threads: int) -> None:
        torch.set_num_threads(threads)
        from minite.sampler import make_engine

        if self.engine is not None:  # its memory must be free before the next one takes as much
            self.engine.close()
            self.engine = None
        self.engine = make_engine(config, plan)

    def update(self, bucket_refs: list[ray.ObjectRef], version: WeightVersion) -> dict[str, float]:
        """Seconds by phase."""
        clock = Clock()
        update_weights(self.engine, map(unflatten, clock.during("fetch", map(ray.get, bucket_refs))), version)
        return clock.seconds | self.engine.stats().update_seconds

    def generate(self, requests: list[Request]) -> list[Completion]:
        with named_numbers("sampler"):
            return self.engine.generate(requests)


@dataclass
class Share:
    """Whole groups of requests that one sampler works on, with one weight version."""

    index: int  # of the sampler
    requests: list[Request]
    actor: Any
    ref: ray.ObjectRef
    weight_step: int  # WeightVersion.step; later than at the submission where the work had to be done again


class SamplerPool:
    """Requests are dealt out by prompt, so that a group stays on one engine.

    weights: exports the learner's weights again, for a sampler that is replaced between two updates. `use_plan` comes
    first.
    """

    _plan: PrecisionPlan

    def __init__(self, config: RunConfig, slot: Slot, recovery: Recovery, weights: Callable[[], Exported]) -> None:
        self._config, self._threads = config, slot.threads
        self._class = ray.remote(num_cpus=slot.cpus, num_gpus=slot.sampler_gpus)(_Sampler)
        self._recovery, self._weights, self._timeout = recovery, weights, config.driver.timeout
        self._engines = [self._class.remote() for _ in range(config.sampler.count)]
        self._processes: list[psutil.Process] = []
        self._versions: list[WeightVersion | None] = [None] * config.sampler.count  # that each holds

    def use_plan(self, plan: PrecisionPlan) -> None:
        """New engines of this plan in the same processes. They have no weights before the next update."""
        self._plan = plan
        self._processes = self._find(self._engines)
        self._answers([self._set_up(e) for e in self._engines])

    def _find(self, engines: list[Any]) -> list[psutil.Process]:
        return processes(self._answers([e.pid.remote() for e in engines]), "sampler")

    def _set_up(self, engine: Any) -> ray.ObjectRef:
        with sharing("the precision plan"):
            return engine.setup.remote(self._config, self._plan, self._threads)

    def update(self, buckets: list[ray.ObjectRef], version: WeightVersion) -> dict[str, float]:
        """Load one weight version everywhere. A sampler that holds other bytes than were sent gets them once more, then
        SyncError names what differs. Returns seconds by phase: the slowest's."""
        told: list[dict[str, float]] = []
        calls = [(e, e.update.remote(buckets, version)) for e in self._engines]
        for index, (actor, ref) in enumerate(calls):
            self._versions[index] = version  # that it shall hold; without it the engine itself refuses to sample
            again = lambda index=index: self._engines[index].update.remote(buckets, version)  # noqa: E731
            try:
                told.append(self._answer(index, actor, ref, again))
            except SyncError as error:
                self._recovery.spend(error, "the weights are sent again")
                with self._recovery.repairing("recovery/resyncs"):
                    told.append(self._answer(index, self._engines[index], again(), again))
        return {phase: max(seconds[phase] for seconds in told) for phase in told[0]}

    def submit(self, groups: Sequence[list[Request]]) -> list[Share]:
        """Start sampling groups of requests; `collect` waits for them."""
        count, shares = len(self._engines), []
        for index, actor in enumerate(self._engines):
            requests = [request for group in groups[index::count] for request in group]
            if requests:
                with sharing("a rollout's prompts"):
                    ref = actor.generate.remote(requests)
                shares.append(Share(index, requests, actor, ref, self._step(index)))
        return shares

    def collect(self, shares: list[Share]) -> list[Completion]:
        """Completions ordered by request id, whatever engine made them."""
        done = [completion for share in shares for completion in self._collect(share)]
        return sorted(done, key=lambda c: c.request_id)

    def _collect(self, share: Share) -> list[Completion]:
        def again() -> ray.ObjectRef:
            share.weight_step = self._step(share.index)
            with sharing("a rollout's prompts"):
                return self._engines[share.index].generate.remote(share.requests)

        completions: list[Completion] = self._answer(share.index, share.actor, share.ref, again, with_weights=True)
        return completions

    def _step(self, index: int) -> int:
        version = self._versions[index]
        assert version is not None, "sync before the first rollout"
        return version.step

    def kill(self) -> None:
        """End all samplers at once, also those that hang."""
        end(self._engines, self._processes)

    def _answers(self, refs: list[ray.ObjectRef]) -> list[Any]:
        return answers(refs, "sampler", self._timeout)

    def _answer(
        self, index: int, actor: Any, ref: ray.ObjectRef, again: Callable[[], ray.ObjectRef], with_weights: bool = False
    ) -> Any:
        """The result of a call on a sampler; when it died or hangs, that of the call made ``again`` on a new one."""
        while True:
            try:
                return self._answers([ref])[0]
            except Lost:
                raise
            except ProcessDied as error:
                if actor is self._engines[index]:  # else an earlier answer has told, and a new one is there
                    self._recovery.spend(error, f"sampler {index} is started again and its work done again")
                    with self._recovery.repairing("recovery/sampler_restarts"):
                        self._replace(index, with_weights)
            actor, ref = self._engines[index], again()

    def _replace(self, index: int, with_weights: bool) -> None:
        """A new process for one sampler. Unless the call brings some, with the weights that the learner has now: those
        of the last sync, or newer ones where a rollout ahead is redone while the next sync is due."""
        end([self._engines[index]], self._processes[index : index + 1])
        self._engines[index] = self._class.remote()
        self._processes[index : index + 1] = self._find([self._engines[index]])
        self._answers([self._set_up(self._engines[index])])
        if with_weights:
            buckets, version, _ = self._weights()
            self._answers([self._engines[index].update.remote(buckets, version)])
            self._versions[index] = version
