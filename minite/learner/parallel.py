"""Process groups: torch.distributed and megatron's layout of ranks."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

from minite.config import RunConfig, env
from minite.errors import UserError


def start(run_config: RunConfig, rank: int, world_size: int, address: str, port: int, device: torch.device) -> None:
    """Join the other ranks. Order of ranks: tensor parallel fastest, then data; experts are split over data ranks."""
    layout = run_config.learner
    if world_size != layout.world_size:
        raise UserError(
            f"learner: {world_size} processes were started, but tensor_parallel {layout.tensor_parallel} times "
            f"max(data_parallel, expert_parallel) {layout.data_ranks} needs {layout.world_size}"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    env.apply_process_group_env()
    timeout = timedelta(seconds=2 * run_config.driver.timeout)  # the driver finds a rank that hangs, and says so
    store = _store(rank, world_size, address, port, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    parallel_state.initialize_model_parallel(
        layout.tensor_parallel,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=1,  # experts are whole; they are split over ranks by expert
        create_gloo_process_groups=False,  # only for checkpoint formats that we do not use
    )
    torch.manual_seed(run_config.seed)  # NVFP4 gradients draw the seeds of their rounding from this generator
    # Nothing of ours draws from megatron's generators on a GPU (no dropout), but its modules insist that they exist.
    model_parallel_cuda_manual_seed(run_config.seed)


def _store(rank: int, world_size: int, address: str, port: int, timeout: timedelta) -> dist.TCPStore:
    """Where the ranks meet. torch's own way would listen on every network of the machine."""
    listener = socket.create_server((address, port)).detach() if rank == 0 else None
    return dist.TCPStore(address, port, world_size, rank == 0, timeout, master_listen_fd=listener)


@dataclass(frozen=True)
class DataRanks:
    """The ranks that see different responses."""

    rank: int
    size: int
    group: dist.ProcessGroup


def data_ranks() -> DataRanks:
    group = parallel_state.get_data_parallel_group()
    return DataRanks(group.rank(), group.size(), group)


def stop() -> None:
    """Leave the groups, so that another learner can start in this process."""
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
