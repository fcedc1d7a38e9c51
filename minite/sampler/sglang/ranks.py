"""The scheduler processes of one engine: under tensor parallelism each computes with its part of every weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class Ranks:
    """This process among them. Every method is collective; alone it costs nothing."""

    rank: int = 0
    size: int = 1
    tensors: dist.ProcessGroup | None = None  # for tensors on the device: NCCL, or gloo on a CPU
    objects: dist.ProcessGroup | None = None  # gloo

    def largest(self, amax: Tensor) -> Tensor:
        """The maximum over the ranks, in place; as layers.matmul.AmaxHooks wants it."""
        if self.size > 1:
            dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.tensors)
        return amax

    def parts(self, tensor: Tensor) -> list[Tensor]:
        """The tensor of each rank, all of one shape and dtype."""
        if self.size == 1:
            return [tensor]
        raw = tensor.contiguous().reshape(-1).view(torch.uint8)  # FP8 is no type of NCCL's
        parts = [torch.empty_like(raw) for _ in range(self.size)]
        dist.all_gather(parts, raw, group=self.tensors)
        return [part.view(tensor.dtype).view(tensor.shape) for part in parts]

    def everyones(self, value: Any) -> list[Any]:
        """What each rank says."""
        if self.size == 1:
            return [value]
        values = [None] * self.size
        dist.all_gather_object(values, value, group=self.objects)
        return list(values)


def of_sglang() -> Ranks:
    """The tensor-parallel group that SGLang has made."""
    from sglang.srt.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    return Ranks(group.rank_in_group, group.world_size, group.device_group, group.cpu_group)
