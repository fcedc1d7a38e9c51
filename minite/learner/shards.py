"""This rank's part of a parameter <-> the full parameter, by megatron's marks on the parameter."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from minite.learner.model import PolicyModel


def full_parameters(model: PolicyModel) -> Iterator[tuple[str, Tensor]]:
    """Every parameter unsharded, in model order: collective, equal on all ranks. One parameter in memory at a time.

    A stack of experts comes as one tensor per expert: ``...linear_fc1.weight{e}`` [N, K].
    """
    for name, param in model.named_parameters():
        full = gather(param)
        if _is_expert(param):
            yield from ((f"{name}{e}", full[e]) for e in range(full.shape[0]))
        else:
            yield name, full


def gather(param: Tensor) -> Tensor:
    """The full tensor of a parameter on every rank, always a copy: training goes on while it is sent."""
    if _is_expert(param):
        return torch.cat(_all_gather(param.data, parallel_state.get_expert_model_parallel_group()))
    if not _is_split(param):
        return param.data.clone()
    parts = _all_gather(param.data, parallel_state.get_tensor_model_parallel_group())
    if param.partition_stride == 1:
        return torch.cat(parts, param.partition_dim)
    # linear_fc1: each rank holds [its gate rows; its up rows].
    halves = [part.chunk(2, param.partition_dim) for part in parts]
    return torch.cat([half[i] for i in range(2) for half in halves], param.partition_dim)


def local_part(param: Tensor, full: Tensor) -> Tensor:
    """What this rank holds of ``full``; not for experts. The inverse of ``gather``."""
    if not _is_split(param):
        return full
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    pieces = full.chunk(param.partition_stride, param.partition_dim)
    return torch.cat([piece.chunk(ranks, param.partition_dim)[rank] for piece in pieces], param.partition_dim)


def set_parameter(parameters: dict[str, Tensor], name: str, full: Tensor) -> None:
    """Write a full parameter (an expert by its global number) into this rank's part, if it has one."""
    param = parameters.get(name)
    if param is not None:
        param.data.copy_(local_part(param, full))
        return
    stem, number = name.rsplit("weight", 1)
    stack = parameters[f"{stem}weight"]
    index = int(number) - parallel_state.get_expert_model_parallel_rank() * stack.shape[0]
    if 0 <= index < stack.shape[0]:
        stack.data[index].copy_(full)


def _is_expert(param: Tensor) -> bool:
    return not getattr(param, "allreduce", True)


def _is_split(param: Tensor) -> bool:
    return getattr(param, "tensor_model_parallel", False)


def _all_gather(part: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    parts = [torch.empty_like(part) for _ in range(group.size())]
    dist.all_gather(parts, part.contiguous(), group=group)
    return parts
