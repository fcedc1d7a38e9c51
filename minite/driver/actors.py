"""Ray: the processes of a run. A group of learner ranks and a pool of samplers behind plain method calls.

Actors have empty constructors; ``setup`` does the work, so that a user's mistake comes back as the exception it is
and not as "the actor died".
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from minite.backends.device import use_cuda
from minite.config import PrecisionPlan, RunConfig, env
from minite.errors import UserError
from minite.sampler.engine import Completion, EngineStats, Request
from minite.types import RolloutBatch, WeightVersion

OBJECT_STORE_BYTES = 256 << 20  # enough for weight buckets and rollouts; Ray's default takes a third of the memory


@dataclass(frozen=True)
class Slot:
    """What one actor gets of the machine."""

    cpus: float  # Ray's bookkeeping: colocated learner and sampler share a core
    threads: int  # of torch


class _Learner:
    """One rank of the Megatron learner."""

    def setup(
        self, config: RunConfig, plan: PrecisionPlan, rank: int, world: int, port: int, threads: int
    ) -> None:
        torch.set_num_threads(threads)
        from minite.learner.worker import LearnerWorker  # megatron is heavy and belongs to this process only

        self.worker = LearnerWorker(config, plan, rank, world, "127.0.0.1", port)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.worker, method)(*args)

    def export(self) -> tuple[list[ray.ObjectRef], WeightVersion] | None:
        """Put each bucket into the object store; samplers fetch them one by one."""
        exported = self.worker.export()
        if exported is None:
            return None
        buckets, version = exported
        return [ray.put(bucket) for bucket in buckets], version


class _Sampler:
    """One sampler engine."""

    def setup(self, config: RunConfig, plan: PrecisionPlan, threads: int) -> None:
        torch.set_num_threads(threads)
        from minite.sampler import make_engine

        self.engine = make_engine(config, plan)

    def update(self, bucket_refs: list[ray.ObjectRef], version: WeightVersion) -> str:
        self.engine.begin_update(version)
        for ref in bucket_refs:
            self.engine.load_bucket(ray.get(ref))
        return self.engine.finish_update()

    def generate(self, requests: list[Request]) -> list[Completion]:
        return self.engine.generate(requests)

    def stats(self) -> EngineStats:
        return self.engine.stats()


def _get(refs: Any) -> Any:
    """ray.get that hands on the exception raised in the actor instead of Ray's wrapping of it."""
    try:
        return ray.get(refs)
    except ray.exceptions.RayTaskError as error:
        raise error.cause if isinstance(error.cause, UserError) else error from None


class LearnerGroup:
    """All learner ranks. Every method is collective; the result is rank 0's."""

    def __init__(self, config: RunConfig, plan: PrecisionPlan, slot: Slot) -> None:
        self.world_size = config.learner.world_size
        gpus = slot.cpus if use_cuda(config.learner.device) else 0
        actor = ray.remote(num_cpus=slot.cpus, num_gpus=gpus)(_Learner)
        self._ranks = [actor.remote() for _ in range(self.world_size)]
        port = _free_port()
        _get(
            [
                a.setup.remote(config, plan, rank, self.world_size, port, slot.threads)
                for rank, a in enumerate(self._ranks)
            ]
        )

    def _call(self, method: str, *args: Any) -> Any:
        shared = [ray.put(a) if isinstance(a, RolloutBatch) else a for a in args]
        return _get([a.call.remote(method, *shared) for a in self._ranks])[0]

    def load_hf(self, path: Path) -> None:
        """Start from a Hugging Face directory, with a fresh optimizer; also sets the KL reference."""
        self._call("load_hf", str(path))

    def save_hf(self, path: Path) -> None:
        self._call("save_hf", str(path))

    def sft_step(self, batch: RolloutBatch) -> dict[str, float]:
        return self._call("sft_step", batch)

    def logprobs(self, batch: RolloutBatch, which: str = "policy") -> tuple[Tensor, Tensor]:
        """(logprob_T float64 [nats], entropy_T float32 [nats])."""
        return self._call("logprobs", batch, which)

    def train_step(self, batch: RolloutBatch, denominator: float) -> dict[str, float]:
        return self._call("train_step", batch, denominator)

    def export(self) -> tuple[list[ray.ObjectRef], WeightVersion]:
        return _get([a.export.remote() for a in self._ranks])[0]

    def save(self, directory: Path) -> None:
        self._call("save", str(directory))

    def load(self, directory: Path) -> None:
        self._call("load", str(directory))

    def close(self) -> None:
        for actor in self._ranks:
            ray.kill(actor)


class SamplerPool:
    """All samplers. Requests are dealt out by prompt so that a group stays on one engine."""

    def __init__(self, config: RunConfig, plan: PrecisionPlan, slot: Slot) -> None:
        gpus = slot.cpus if use_cuda(config.sampler.device) else 0
        actor = ray.remote(num_cpus=slot.cpus, num_gpus=gpus)(_Sampler)
        self._engines = [actor.remote() for _ in range(config.sampler.count)]
        _get([e.setup.remote(config, plan, slot.threads) for e in self._engines])

    def update(self, buckets: list[ray.ObjectRef], version: WeightVersion) -> None:
        """Load one weight version everywhere; raises SyncError naming what differs."""
        _get([e.update.remote(buckets, version) for e in self._engines])

    def submit(self, groups: Sequence[list[Request]]) -> list[ray.ObjectRef]:
        """Start sampling groups of requests; `collect` waits for them."""
        count = len(self._engines)
        shares = [[r for group in groups[i::count] for r in group] for i in range(count)]
        return [e.generate.remote(share) for e, share in zip(self._engines, shares, strict=True) if share]

    def collect(self, refs: list[ray.ObjectRef]) -> list[Completion]:
        """Completions ordered by request id, whatever engine made them."""
        return sorted((c for part in _get(refs) for c in part), key=lambda c: c.request_id)

    def stats(self) -> list[EngineStats]:
        return _get([e.stats.remote() for e in self._engines])


@contextlib.contextmanager
def cluster(config: RunConfig) -> Iterator[Slot]:
    """A local Ray for the time of a run, shut down whatever happens. Raises UserError when the CPUs do not suffice."""
    learners, samplers = config.learner.world_size, config.sampler.count
    cpus = config.driver.num_cpus or len(os.sched_getaffinity(0))
    colocated = config.driver.placement == "colocated"
    needed = max(learners, samplers) if colocated else learners + samplers
    if needed > cpus:
        raise UserError(
            f"placement: {config.driver.placement} with {learners} learner rank(s) and {samplers} sampler(s) needs "
            f"{needed} CPUs, got {cpus}: lower learner.*_parallel or sampler.count, or let them share cores with "
            f"-o driver.num_cpus={needed}"
        )
    env.apply_ray_env()
    ray.init(
        num_cpus=cpus,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        logging_level="ERROR",
        log_to_driver=False,
    )
    try:
        yield Slot(0.5 if colocated else 1.0, config.driver.threads)
    finally:
        ray.shutdown()


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
