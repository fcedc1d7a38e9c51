"""Ray on this machine: who gets which share of it, and a cluster that lives as long as the run."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import psutil
import ray
import torch
from ray._private import ray_constants
from ray._private.utils import estimate_available_memory
from ray._raylet import Config as RayConfig

from minite.backends.device import use_cuda
from minite.config import PrecisionPlan, RunConfig, env, memory
from minite.driver import undertaker
from minite.errors import ProcessDied, UserError
from minite.ports import LOOPBACK

STARTS = 3  # of Ray, where the machine is too busy for it
OBJECT_STORE_BYTES = 256 << 20  # for rollouts and arguments, beside the weights
FILLED = 0.8  # of the store; beyond it Ray moves objects to files
SHARED_MEMORY = "/dev/shm"


@dataclass(frozen=True)
class Slot:
    """What one actor gets of the machine."""

    cpus: float  # Ray's bookkeeping: colocated learner and sampler share a core
    learner_gpus: float  # colocated, a learner rank and a sampler share a GPU, but no two ranks do
    sampler_gpus: float
    threads: int  # of torch


def find_slot(config: RunConfig) -> Slot:
    """The share of each actor. Raises UserError when CPUs or GPUs do not suffice for the placement."""
    learners, samplers = config.learner.world_size, config.sampler.count
    colocated = config.driver.placement == "colocated"
    cpus, needed = _cpus(config), max(learners, samplers) if colocated else learners + samplers
    if needed > cpus:
        raise UserError(
            f"placement: {config.driver.placement} with {learners} learner rank(s) and {samplers} sampler(s) needs "
            f"{needed} CPUs, got {cpus}: lower learner.*_parallel or sampler.count, or let them share cores with "
            f"-o driver.num_cpus={needed}"
        )
    on_gpu = (use_cuda(config, "learner"), use_cuda(config, "sampler"))
    wanted = learners * on_gpu[0], samplers * on_gpu[1]
    gpus, missing = torch.cuda.device_count(), max(wanted) if colocated else sum(wanted)
    if missing > gpus:
        raise UserError(
            f"placement: {config.driver.placement} with {learners} learner rank(s) and {samplers} sampler(s) needs "
            f"{missing} GPUs, got {gpus}: lower learner.*_parallel or sampler.count, or set learner.device or "
            "sampler.device to cpu"
        )
    if on_gpu[1] and config.sampler.tensor_parallel > 1:
        raise UserError(
            f"sampler.tensor_parallel is {config.sampler.tensor_parallel}, but minite train places each engine on one "
            "GPU: set it to 1 and raise sampler.count"
        )
    share = (0.6, 0.4) if colocated else (1.0, 1.0)  # over a half, so that Ray never puts two ranks on one GPU
    return Slot(
        cpus=0.5 if colocated else 1.0,
        learner_gpus=share[0] * on_gpu[0],
        sampler_gpus=share[1] * on_gpu[1],
        threads=config.driver.threads,
    )


def _cpus(config: RunConfig) -> int:
    return config.driver.num_cpus or len(os.sched_getaffinity(0))


def store_bytes(config: RunConfig, plan: PrecisionPlan) -> tuple[int, str | None]:
    """Size of Ray's object store, and what there is to say of it.

    It takes one whole set of weights, as all buckets of a sync are there at once. Where shared memory has not the room,
    or half of what memory is left, which it counts in, the store is small and Ray moves buckets to files: slower, but
    Ray refuses a large store outside of shared memory, and one that leaves the processes too little.
    """
    packed = config.sampler.transport == "packed"
    sent = memory.stored_bytes(config, plan if packed else dataclasses.replace(plan, entries=()))
    wanted = int((sent + OBJECT_STORE_BYTES) / FILLED)
    rooms = {f"of {SHARED_MEMORY}": shutil.disk_usage(SHARED_MEMORY).free}
    rooms["of memory, which is half of what is left"] = estimate_available_memory() // 2  # within a container's limit
    where, free = min(rooms.items(), key=lambda room: room[1])
    if wanted < free:
        return wanted, None
    if sent < FILLED * OBJECT_STORE_BYTES / 2:  # a rollout fits beside it
        return OBJECT_STORE_BYTES, None
    return OBJECT_STORE_BYTES, (
        f"each sync moves {sent / memory.GIB:.1f} GiB of weights through files in /tmp: Ray's object store would need "
        f"{wanted / memory.GIB:.1f} GiB, and there are {free / memory.GIB:.1f} {where}; give it more"
    )


@contextlib.contextmanager
def cluster(config: RunConfig, plan: PrecisionPlan) -> Iterator[None]:
    """A Ray of its own on this machine for the time of a run, shut down whatever happens.

    A caller that has called ray.init itself keeps its Ray, before and after.
    """
    if ray.is_initialized():
        yield
        return
    env.apply_ray_env()
    RayConfig.initialize("")  # this process read its variables when ray was imported, and would ask its Ray for a token
    folder = tempfile.mkdtemp(prefix="minite-ray-", dir="/tmp")  # TMPDIR may be too long for the path of a socket
    keep, waiting, others = False, None, psutil.Process().children(recursive=True)
    try:
        _init_ray(_cpus(config), store_bytes(config, plan)[0], folder)
        waiting = _start_undertaker(folder, others)
        # Ray answers SIGTERM (a batch system's way to stop a job) with a stack dump and an abort.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        yield
    except ProcessDied as error:
        keep = True
        raise ProcessDied(f"{error}; its last words are in a .err file under {folder}") from None
    finally:
        if waiting is not None:
            waiting.kill()
            waiting.communicate()
        ray.shutdown()
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)  # Ray itself would leave it for ever


def _init_ray(cpus: int, store: int, folder: str) -> None:
    """Start Ray, on loopback. Its own processes get 30 seconds to come up, fixed, which a busy machine may exceed."""
    ray_constants.ENABLE_RAY_CLUSTER = False  # as env.apply_ray_env says; Ray read the variable when it was imported
    for start in range(STARTS):
        try:
            ray.init(
                address="local",  # never a cluster that happens to run here
                num_cpus=cpus,
                include_dashboard=False,
                object_store_memory=store,
                logging_level="ERROR",
                log_to_driver=False,
                _temp_dir=folder,
            )
            break
        except Exception as error:
            if "timed out during startup" not in str(error) or start == STARTS - 1:
                raise
            ray.shutdown()
    if (address := ray.util.get_node_ip_address()) != LOOPBACK:  # anybody on that network could run code here
        raise RuntimeError(f"Ray {ray.__version__} listens on {address}, expected {LOOPBACK}")


def _start_undertaker(folder: str, others: Sequence[psutil.Process]) -> subprocess.Popen[bytes]:
    """A process that outlives this one, to clear up behind Ray. ``others``: children that are not Ray's."""
    started = [p for p in psutil.Process().children(recursive=True) if p not in others]
    return subprocess.Popen(
        [sys.executable, "-P", undertaker.__file__, folder, *(f"{p.pid}@{p.create_time()}" for p in started)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # a Ctrl-C is not for it
    )
