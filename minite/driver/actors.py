"""The processes of a run as Ray actors. A group of learner ranks and a pool of samplers behind plain method calls.

Actors have empty constructors; ``setup`` does the work, so that a user's mistake comes back as the exception it is
and not as "the actor died".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from torch import Tensor

from minite.config import PrecisionPlan, RunConfig
from minite.driver.cluster import Slot
from minite.driver.ports import free_port
from minite.errors import ProcessDied, UserError
from minite.sampler.engine import Completion, EngineStats, Request
from minite.sync.clock import Clock
from minite.sync.flat import flatten, unflatten
from minite.types import RolloutBatch, WeightVersion

Exported = tuple[list[ray.ObjectRef], WeightVersion, dict[str, float]]  # flat buckets, seconds by phase
GRACE = 5.0  # for the other actors of a failed call to fail too, so that the first cause can be told [s]


class _Learner:
    """One rank of the Megatron learner."""

    worker: Any = None

    def setup(self, config: RunConfig, plan: PrecisionPlan, rank: int, world: int, port: int, threads: int) -> None:
        torch.set_num_threads(threads)
        from minite.learner.worker import LearnerWorker  # megatron is heavy and belongs to this process only

        if self.worker is not None:
            self.worker.close()
        self.worker = LearnerWorker(config, plan, rank, world, "127.0.0.1", port)

    def call(self, method: str, *args: Any) -> Any:
        return getattr(self.worker, method)(*args)

    def export(self) -> Exported | None:
        """Put each bucket into the object store; samplers fetch them one by one."""
        exported = self.worker.export()
        if exported is None:
            return None
        buckets, version = exported
        clock = Clock()
        with clock.timed("put"):  # flat, since each of many views would take its whole storage along
            refs = [ray.put(flatten(bucket)) for bucket in buckets]
        return refs, version, self.worker.export_seconds | clock.seconds


class _Sampler:
    """One sampler engine."""

    engine: Any = None

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
        self.engine.begin_update(version)
        for flat in clock.during("fetch", map(ray.get, bucket_refs)):
            self.engine.load_bucket(unflatten(flat))
        self.engine.finish_update()
        return clock.seconds | self.engine.stats().update_seconds

    def generate(self, requests: list[Request]) -> list[Completion]:
        return self.engine.generate(requests)

    def stats(self) -> EngineStats:
        return self.engine.stats()


def _get(refs: list[ray.ObjectRef], kind: str) -> list[Any]:
    """Results of a call on several actors of one ``kind``. Raises what best explains a failure: a UserError raised
    in any of them, ProcessDied, else the first exception with the actor's traceback."""
    try:
        return ray.get(refs)
    except ray.exceptions.RayError as error:
        raise _explain(error, refs, kind) from None


def _explain(first: ray.exceptions.RayError, refs: list[ray.ObjectRef], kind: str) -> Exception:
    """When a rank dies or refuses, the others report broken connections, and perhaps earlier."""
    errors = [first]
    if not isinstance(getattr(first, "cause", None), UserError):
        for ref in ray.wait(refs, num_returns=len(refs), timeout=GRACE)[0]:
            try:
                ray.get(ref)
            except ray.exceptions.RayError as error:
                errors.append(error)
    for error in errors:
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, UserError):
            return error.cause
    if any(isinstance(error, ray.exceptions.RayActorError) for error in errors):
        return ProcessDied(f"a {kind} process died: it was killed, ran out of memory or crashed")
    return first


class LearnerGroup:
    """The processes of all learner ranks. `setup` comes first; every method is collective, the result is rank 0's."""

    def __init__(self, config: RunConfig, slot: Slot) -> None:
        actor = ray.remote(num_cpus=slot.cpus, num_gpus=slot.learner_gpus)(_Learner)
        self._ranks = [actor.remote() for _ in range(config.learner.world_size)]
        self._threads = slot.threads

    def setup(self, config: RunConfig, plan: PrecisionPlan) -> None:
        """Become the learner of a recipe, with fresh weights. A second recipe, of the same layout, replaces the first:
        the processes and their imports stay."""
        world, port = len(self._ranks), free_port()
        self._all(lambda rank, a: a.setup.remote(config, plan, rank, world, port, self._threads))

    def _all(self, call: Callable[[int, Any], ray.ObjectRef]) -> Any:
        return _get([call(rank, a) for rank, a in enumerate(self._ranks)], "learner")[0]

    def _call(self, method: str, *args: Any) -> Any:
        shared = [ray.put(a) if isinstance(a, RolloutBatch) else a for a in args]
        return self._all(lambda _, a: a.call.remote(method, *shared))

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

    def train_step(self, batch: RolloutBatch, denominator: float, lr_scale: float = 1.0) -> dict[str, float]:
        return self._call("train_step", batch, denominator, lr_scale)

    def router_flips(self) -> dict[str, float]:
        """Of the last `logprobs`; empty where there is nothing to count."""
        return self._call("router_flips")

    def use_plan(self, plan: PrecisionPlan) -> None:
        """Compute under another plan of the same model from here on."""
        self._call("use_plan", plan)

    def export(self) -> Exported:
        """The learner's weights as samplers take them, their version, and the seconds this took by phase."""
        return self._all(lambda _, a: a.export.remote())

    def save(self, directory: Path) -> None:
        self._call("save", str(directory))

    def load(self, directory: Path) -> None:
        self._call("load", str(directory))


class SamplerPool:
    """All samplers. Requests are dealt out by prompt so that a group stays on one engine."""

    def __init__(self, config: RunConfig, plan: PrecisionPlan, slot: Slot) -> None:
        actor = ray.remote(num_cpus=slot.cpus, num_gpus=slot.sampler_gpus)(_Sampler)
        self._engines = [actor.remote() for _ in range(config.sampler.count)]
        self._config, self._threads = config, slot.threads
        self.use_plan(plan)

    def use_plan(self, plan: PrecisionPlan) -> None:
        """New engines of this plan in the same processes. They have no weights before the next update."""
        _get([e.setup.remote(self._config, plan, self._threads) for e in self._engines], "sampler")

    def update(self, buckets: list[ray.ObjectRef], version: WeightVersion) -> dict[str, float]:
        """Load one weight version everywhere; raises SyncError naming what differs. Seconds by phase: the slowest's."""
        told = _get([e.update.remote(buckets, version) for e in self._engines], "sampler")
        return {phase: max(seconds[phase] for seconds in told) for phase in told[0]}

    def submit(self, groups: Sequence[list[Request]]) -> list[ray.ObjectRef]:
        """Start sampling groups of requests; `collect` waits for them."""
        count = len(self._engines)
        shares = [[r for group in groups[i::count] for r in group] for i in range(count)]
        return [e.generate.remote(share) for e, share in zip(self._engines, shares, strict=True) if share]

    def collect(self, refs: list[ray.ObjectRef]) -> list[Completion]:
        """Completions ordered by request id, whatever engine made them."""
        return sorted((c for part in _get(refs, "sampler") for c in part), key=lambda c: c.request_id)

    def stats(self) -> list[EngineStats]:
        return _get([e.stats.remote() for e in self._engines], "sampler")
