"""The learner ranks as Ray actors behind plain method calls, and what the failures of actors look like to the driver.

Actors have empty constructors; ``setup`` does the work, so that a user's mistake comes back as the exception it is
and not as "the actor died".
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import ray
import torch
from torch import Tensor

from minite.config import PrecisionPlan, RunConfig
from minite.driver.cluster import Slot
from minite.errors import ProcessDied, UserError
from minite.formats import NonFiniteError
from minite.ports import LOOPBACK, free_port
from minite.sync.clock import Clock
from minite.sync.flat import flatten
from minite.types import RolloutBatch, WeightVersion

Exported = tuple[list[ray.ObjectRef], WeightVersion, dict[str, float]]  # flat buckets, seconds by phase
GRACE = 5.0  # for the other actors of a failed call to fail too, so that the first cause can be told [s]


@contextlib.contextmanager
def named_numbers(kind: str) -> Iterator[None]:
    """Where weights or activations are NaN or Inf nothing can be skipped: the run ends, and says which."""
    try:
        yield
    except NonFiniteError as error:
        raise UserError(
            f"a {kind} cannot compute: {error}; stopped. The newest checkpoint is intact: go on from it with minite "
            "resume, and lower the learning rate if this comes again"
        ) from None


class _Learner:
    """One rank of the Megatron learner."""

    worker: Any = None

    def setup(self, config: RunConfig, plan: PrecisionPlan, rank: int, world: int, port: int, threads: int) -> None:
        torch.set_num_threads(threads)
        from minite.learner.worker import LearnerWorker  # megatron is heavy and belongs to this process only

        if self.worker is not None:
            self.worker.close()
            self.worker = None
        self.worker = LearnerWorker(config, plan, rank, world, LOOPBACK, port)

    def pid(self) -> int:
        return os.getpid()

    def call(self, method: str, *args: Any) -> Any:
        with named_numbers("learner"):
            return getattr(self.worker, method)(*args)

    def export(self) -> Exported | None:
        """Put each bucket into the object store; samplers fetch them one by one."""
        exported = self.call("export")
        if exported is None:
            return None
        buckets, version = exported
        clock = Clock()
        with clock.timed("put"):  # flat, since each of many views would take its whole storage along
            refs = []
            while buckets:  # each is gone from here once it is there
                refs.append(ray.put(flatten(buckets.pop(0))))
        return refs, version, self.worker.export_seconds | clock.seconds


class Lost(ProcessDied):
    """Shared data cannot be stored, or went with the process that owned it: nothing that one new actor would mend."""


_LOST = (ray.exceptions.ObjectStoreFullError, ray.exceptions.OutOfDiskError, ray.exceptions.ObjectLostError)


@contextlib.contextmanager
def sharing(what: str) -> Iterator[None]:
    """Around calls that put data into Ray's object store. Raises Lost when it does not take ``what``."""
    try:
        yield
    except _LOST as error:
        raise Lost(f"{what} cannot be shared ({type(error).__name__})") from None


def answers(refs: list[ray.ObjectRef], kind: str, timeout: float) -> list[Any]:
    """Results of a call on several actors of one ``kind``. Raises what best explains a failure: a UserError raised
    in any of them, ProcessDied (also after ``timeout`` [s]), else the first exception with the actor's traceback."""
    try:
        return ray.get(refs, timeout=timeout)
    except ray.exceptions.GetTimeoutError:
        raise ProcessDied(f"a {kind} process did not answer within {timeout:g} s (driver.timeout)") from None
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
        if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, UserError | ProcessDied):
            return error.cause
    for error in errors:
        cause = error.cause if isinstance(error, ray.exceptions.RayTaskError) else error
        if isinstance(cause, _LOST):
            return Lost(f"a {kind} process could not share its data ({type(cause).__name__})")
    if any(isinstance(error, ray.exceptions.RayActorError) for error in errors):
        return ProcessDied(f"a {kind} process died: it was killed, ran out of memory or crashed")
    return first


class LearnerGroup:
    """The processes of all learner ranks. `setup` comes first; every method is collective, the result is rank 0's."""

    def __init__(self, config: RunConfig, slot: Slot) -> None:
        actor = ray.remote(num_cpus=slot.cpus, num_gpus=slot.learner_gpus)(_Learner)
        self._ranks = [actor.remote() for _ in range(config.learner.world_size)]
        self._threads, self._timeout = slot.threads, config.driver.timeout
        self._processes: list[psutil.Process] = []

    def setup(self, config: RunConfig, plan: PrecisionPlan) -> None:
        """Become the learner of a recipe, with fresh weights. A second recipe, of the same layout, replaces the first:
        the processes and their imports stay."""
        world, port = len(self._ranks), free_port()
        pids = answers([a.pid.remote() for a in self._ranks], "learner", self._timeout)
        self._processes = processes(pids, "learner")
        self._all(lambda rank, a: a.setup.remote(config, plan, rank, world, port, self._threads), "the precision plan")

    def kill(self) -> None:
        """End all ranks at once, also those that hang."""
        end(self._ranks, self._processes)

    def _all(self, call: Callable[[int, Any], ray.ObjectRef], what: str = "the arguments of a call") -> Any:
        with sharing(what):  # arguments of more than 100 kB go through the store
            refs = [call(rank, a) for rank, a in enumerate(self._ranks)]
        return answers(refs, "learner", self._timeout)[0]

    def _call(self, method: str, *args: Any) -> Any:
        with sharing("the batch"):
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

    def unsound_gradients(self) -> list[str]:
        """Parameters for whose gradient the last skipped step was skipped."""
        return self._call("unsound_gradients")

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


def processes(pids: Sequence[int], kind: str) -> list[psutil.Process]:
    """Of actors that have told their numbers. Raises ProcessDied for one that died since."""
    try:
        return [psutil.Process(pid) for pid in pids]
    except psutil.NoSuchProcess:
        raise ProcessDied(f"a {kind} process died while the others started") from None


def end(actors: Sequence[Any], processes: Sequence[psutil.Process]) -> None:
    """Kill actors, and their processes too: one that hangs does not hear Ray."""
    for actor in actors:
        ray.kill(actor)
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):  # psutil knows a number that came round again
            process.kill()
