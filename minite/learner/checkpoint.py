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
    by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded)
    _on_first_rank(lambda: _write_common(directory, common), directory)
    try:
        torch.distributed.checkpoint.save(
            mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=FileSystemWriter(directory),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )
    except CheckpointException as error:  # torch tells every rank what became of the others
        raise _told(directory, [wrapped[0] for wrapped in error.failures.values()]) from None


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
    """Read what ``save`` wrote under the same parallel layout; training goes on bit for bit. Raises UserError."""
    try:
        _check(policy, dist_checkpointing.load_common_state_dict(str(directory)), directory)
        state = dist_checkpointing.load(_state(policy, loading=True), str(directory), SafeLoad())
    except UserError:
        raise
    except (Exception, CheckpointException) as error:  # torch's, which is none, megatron's, the operating system's
        raise UserError(f"checkpoint {directory}: cannot be read ({_cause(error)}); resume from another one") from None
    policy.model.load_state_dict(state["model"])
    policy.optimizer.load_state_dict(state["optimizer"])
    optimizer.set_adam_step(policy.optimizer, state["adam_step"])
    policy.model.weights_changed()
    policy.step = state["step"]
    torch.set_rng_state(state["rng"])


def _cause(error: BaseException) -> str:
    """In one line. torch tells every rank what all that failed say, with their tracebacks."""
    if isinstance(error, CheckpointException):
        error = next((wrapped[0] for wrapped in error.failures.values()), error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


def _check(policy: Policy, common: dict[str, Any], directory: Path) -> None:
    for what, saved, now in (
        ("parallel layout (tensor, data, expert)", common.get("layout"), _layout(policy)),
        ("plan digest", common.get("plan_digest"), policy.plan.digest),
    ):
        if saved != now:
            raise UserError(
                f"checkpoint {directory}: written with {what} {saved}, this run has {now}; resume as it was"
            )


def _layout(policy: Policy) -> tuple[int, int, int]:
    layout = policy.config.learner
    return layout.tensor_parallel, layout.data_ranks, layout.expert_parallel


def _metadata() -> dict[str, Any]:
    # The one format of optimizer state that torch's own Adam can be read back from. It fixes the tensor- and
    # expert-parallel layout; weights move between layouts as a Hugging Face directory.
    return {"distrib_optim_sharding_type": "dp_reshardable", "singleton_local_shards": False}


def _state(policy: Policy, loading: bool) -> dict[str, Any]:
    metadata = {**_metadata(), "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    model = policy.model.sharded_state_dict(metadata=metadata)
    rank, world = dist.get_rank(), dist.get_world_size()
    return {
        "model": model,
        "optimizer": policy.optimizer.sharded_state_dict({"model": model}, is_loading=loading, metadata=metadata),
        "step": policy.step,
        "adam_step": optimizer.adam_step(policy.optimizer),
        "layout": _layout(policy),
        "plan_digest": policy.plan.digest,
        "rng": ShardedObject("rng", torch.get_rng_state(), (world,), (rank,)),
    }
