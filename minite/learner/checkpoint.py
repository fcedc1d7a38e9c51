"""Model, optimizer, step count and generator through megatron's dist_checkpointing."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.state_dict_utils import save_preprocess
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from minite.errors import DiskError, UserError
from minite.learner import optimizer
from minite.learner.safe_load import SafeLoad

MOST_RANKS = 1 << 16

if TYPE_CHECKING:
    from minite.learner.policy import Policy


def save(policy: Policy, directory: Path) -> None:
    """Write a checkpoint; collective. The directory is made; it must be empty or absent.

    In megatron's torch_dist format, but by this process: megatron's own writer forks helpers and keeps a manager
    process, which is seconds per save, a fork in a process full of threads, and an orphan when the learner is killed.
    Its aim, to write while training goes on, is not ours.

    What fails on one rank is raised on all, so that no rank waits for one that has given up: DiskError when the disk
    is to blame, after which training can go on, RuntimeError otherwise.
    """
    sharded, common = save_preprocess(_state(policy, loading=False))
    _on_first_rank(lambda: _write_common(directory, common), directory)
    try:
        write_parts(sharded, directory)
    except CheckpointException as error:  # torch tells every rank what became of the others
        raise _told(directory, [wrapped[0] for wrapped in error.failures.values()]) from None


def write_parts(sharded: dict[str, Any], directory: Path | str) -> None:
    """A state's sharded part in megatron's torch_dist format; collective. torch spreads what several ranks hold."""
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded)
    torch.distributed.checkpoint.save(
        mcore_to_pyt_state_dict(by_key, is_loading=False),
        storage_writer=FileSystemWriter(directory),
        planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
    )


def _write_common(directory: Path, common: dict[str, Any]) -> None:
    """What is the same on all ranks, and the two words by which megatron knows the format."""
    directory.mkdir(parents=True, exist_ok=True)
    content = io.BytesIO()  # written by Python, which says what is wrong with a disk
    torch.save(common, content)
    (directory / COMMON_STATE_FNAME).write_bytes(content.getvalue())
    save_config(CheckpointingConfig("torch_dist", 1), str(directory))


def _on_first_rank(write: Callable[[], None], directory: Path) -> None:
    failure: list[Exception | None] = [None]
    if dist.get_rank() == 0:
        try:
            write()
        except Exception as error:
            failure = [error]
    dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise _told(directory, failure) from None


def _told(directory: Path, failures: Sequence[BaseException | None]) -> Exception:
    """The first failure that is no disk's, as a RuntimeError, else the first as a DiskError."""
    others = [error for error in failures if not _of_disk(error)]
    first = (others or failures)[0]
    kind = RuntimeError if others else DiskError
    return kind(f"checkpoint {directory}: {type(first).__name__}: {first}")


def _of_disk(error: BaseException | None) -> bool:
    """torch's writer of files, which PyTorch keeps in inline_container.cc, calls a full disk a RuntimeError."""
    return isinstance(error, OSError) or (isinstance(error, RuntimeError) and "inline_container.cc" in str(error))


def load(policy: Policy, directory: Path) -> None:
    """Read what ``save`` wrote, under any parallel layout. Raises UserError.

    Under the layout it was written with, training goes on bit for bit; under another one the order of sums differs, and
    NVFP4 gradients are rounded by other random numbers.
    """
    try:
        common = dist_checkpointing.load_common_state_dict(str(directory))
        _check(policy, common, directory)
        wanted = _state(policy, loading=True, ranks=common["ranks"])
        state = dist_checkpointing.load(wanted, str(directory), SafeLoad())
    except UserError:
        raise
    except (Exception, CheckpointException) as error:  # torch's, which is none, megatron's, the operating system's
        raise UserError(f"checkpoint {directory}: cannot be read ({_cause(error)}); resume from another one") from None
    policy.model.load_state_dict(state["model"])
    optimizer.load_states(policy.optimizer, state["optimizer"], state["adam_step"])
    policy.model.weights_changed()
    policy.step = state["step"]
    torch.set_rng_state(state["rng"][0])


def _cause(error: BaseException) -> str:
    """In one line. torch tells every rank what all that failed say, with their tracebacks."""
    if isinstance(error, CheckpointException):
        error = next((wrapped[0] for wrapped in error.failures.values()), error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _check(policy: Policy, common: dict[str, Any], directory: Path) -> None:
    ranks, digest = common.get("ranks"), common.get("plan_digest")
    if not isinstance(ranks, int) or not 0 < ranks <= MOST_RANKS:
        raise UserError(
            f"checkpoint {directory}: it was written by {ranks} ranks, expected a number up to {MOST_RANKS}; an older "
            "version may have written it: end the run with that one, or start a new one from its weights"
        )
    if digest != policy.plan.digest:
        raise UserError(
            f"checkpoint {directory}: written with plan digest {digest}, this run has {policy.plan.digest}; resume as "
            "it was"
        )


def _state(policy: Policy, loading: bool, ranks: int | None = None) -> dict[str, Any]:
    """``ranks``: of a checkpoint to load, how many wrote it. More than that share generators, fewer take the first."""
    data_group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    model = policy.model.sharded_state_dict(metadata={"singleton_local_shards": False, "dp_cp_group": data_group})
    rank, world = dist.get_rank(), dist.get_world_size()
    ranks = ranks or world
    mine = range(rank, ranks, world) or [rank % ranks]  # all are read, or megatron misses some
    return {
        "model": model,
        "optimizer": optimizer.sharded_states(policy.optimizer, model, loading),
        "step": policy.step,
        "adam_step": optimizer.adam_step(policy.optimizer),
        "ranks": ranks,
        "plan_digest": policy.plan.digest,
        "rng": [ShardedObject("rng", torch.get_rng_state(), (ranks,), (i,), replica_id=rank // ranks) for i in mine],
    }
