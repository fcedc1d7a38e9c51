"""Model, optimizer, step count and generator through megatron's dist_checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedObject
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistSaveShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException

from minite.errors import DiskError, ProcessDied, UserError
from minite.learner import optimizer

if TYPE_CHECKING:
    from minite.learner.policy import Policy


class _SaveInProcess(TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format written by this process.

    Megatron's own writer forks helpers and keeps a manager process: seconds per save, a fork in a process full of
    threads, and an orphan when the learner is killed. Its aim, to write while training goes on, is not ours.
    """

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: Path | str) -> None:
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(sharded_state_dict, self.keep_only_main_replica)
        torch.distributed.checkpoint.save(
            mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=FileSystemWriter(checkpoint_dir),
            planner=MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False),
        )


def save(policy: Policy, directory: Path) -> None:
    """Write a checkpoint; collective. The directory is made; it must be empty or absent.

    Raises DiskError when it cannot be written and all ranks know; ProcessDied when the others wait for one that could
    not, from which only a new start leads on.
    """
    if dist.get_rank() == 0:
        directory.mkdir(parents=True, exist_ok=True)
    dist.barrier()
    strategy = _SaveInProcess("torch_dist", 1)
    try:
        dist_checkpointing.save(_state(policy, loading=False), str(directory), strategy, content_metadata=_metadata())
    except CheckpointException as error:  # torch tells every rank what the first that failed says
        first = next((wrapped[0] for wrapped in error.failures.values()), error)
        raise DiskError(f"checkpoint {directory}: {type(first).__name__}: {first}") from None
    except (OSError, RuntimeError) as error:  # megatron's files of rank 0; torch.save calls a full disk a RuntimeError
        told = f"checkpoint {directory}: {type(error).__name__}: {error}"
        if dist.get_world_size() > 1:
            raise ProcessDied(f"{told}; the other ranks wait for this one") from None
        raise DiskError(told) from None


def load(policy: Policy, directory: Path) -> None:
    """Read what ``save`` wrote under the same parallel layout; training goes on bit for bit. Raises UserError."""
    try:
        common = dist_checkpointing.load_common_state_dict(str(directory))
    except Exception as error:  # megatron raises its own, torch's and the operating system's
        raise UserError(f"checkpoint {directory}: cannot be read ({error}); resume from another one") from None
    _check(policy, common, directory)
    state = dist_checkpointing.load(_state(policy, loading=True), str(directory))
    policy.model.load_state_dict(state["model"])
    policy.optimizer.load_state_dict(state["optimizer"])
    optimizer.set_adam_step(policy.optimizer, state["adam_step"])
    policy.model.weights_changed()
    policy.step = state["step"]
    torch.set_rng_state(state["rng"])


def _check(policy: Policy, common: dict[str, Any], directory: Path) -> None:
    for what, saved, now in (
        ("parallel layout (tensor, data, expert)", common["layout"], _layout(policy)),
        ("plan digest", common["plan_digest"], policy.plan.digest),
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
