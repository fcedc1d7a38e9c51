"""Invertible renamings and re-layouts between megatron-core parameters and Hugging Face parameters.

Every op owns one megatron parameter and one or more HF parameters, and maps full (unsharded) tensors both ways without
changing a bit. Tensors are only viewed, sliced and copied with their own methods, so nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from torch import Tensor


class WeightOp(Protocol):
    """One megatron parameter <-> its HF parameters."""

    @property
    def megatron(self) -> str: ...

    @property
    def hf(self) -> tuple[str, ...]: ...

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]: ...  # megatron -> HF, in the order of ``hf``

    def join(self, parts: tuple[Tensor, ...]) -> Tensor: ...  # the inverse


@dataclass(frozen=True)
class Rename:
    """The same tensor under another name."""

    megatron: str
    hf: tuple[str]

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        return (tensor,)

    def join(self, parts: tuple[Tensor, ...]) -> Tensor:
        return parts[0]


@dataclass(frozen=True)
class SplitQKV:
    """linear_qkv.weight [(heads + 2 * kv_heads) * head_dim, hidden] <-> q, k, v.

    Megatron lays rows out by KV group: the group's query heads, then its key head, then its value head, so that a
    tensor-parallel slice along rows holds whole groups.
    """

    megatron: str
    hf: tuple[str, str, str]
    num_heads: int
    num_kv_heads: int
    head_dim: int

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        groups, q_per_group = self.num_kv_heads, self.num_heads // self.num_kv_heads
        grouped = tensor.reshape(groups, q_per_group + 2, self.head_dim, tensor.shape[-1])
        parts = (grouped[:, :q_per_group], grouped[:, q_per_group], grouped[:, q_per_group + 1])
        return tuple(part.reshape(-1, tensor.shape[-1]).contiguous() for part in parts)

    def join(self, parts: tuple[Tensor, ...]) -> Tensor:
        q, k, v = parts
        groups, q_per_group = self.num_kv_heads, self.num_heads // self.num_kv_heads
        d, hidden = self.head_dim, q.shape[-1]
        grouped = q.new_empty((groups, q_per_group + 2, d, hidden))
        grouped[:, :q_per_group] = q.reshape(groups, q_per_group, d, hidden)
        grouped[:, q_per_group] = k.reshape(groups, d, hidden)
        grouped[:, q_per_group + 1] = v.reshape(groups, d, hidden)
        return grouped.reshape(-1, hidden)


@dataclass(frozen=True)
class SplitGateUp:
    """linear_fc1.weight [2 * intermediate, hidden], gate rows first <-> gate, up.

    This is the full tensor. Under tensor parallelism each rank's shard is [its gate rows; its up rows], so the gather
    has to interleave them (learner's concern) before this op applies.
    """

    megatron: str
    hf: tuple[str, str]

    def split(self, tensor: Tensor) -> tuple[Tensor, ...]:
        half = tensor.shape[0] // 2
        return (tensor[:half].contiguous(), tensor[half:].contiguous())

    def join(self, parts: tuple[Tensor, ...]) -> Tensor:
        gate, up = parts
        joined = gate.new_empty((gate.shape[0] + up.shape[0], gate.shape[1]))
        joined[: gate.shape[0]], joined[gate.shape[0] :] = gate, up
        return joined


class WeightMap:
    """All ops of one model, found by either name."""

    def __init__(self, ops: Iterable[WeightOp]) -> None:
        self.ops = tuple(ops)
        self._by_megatron = {op.megatron: op for op in self.ops}
        self._by_hf = {name: op for op in self.ops for name in op.hf}
        if len(self._by_megatron) != len(self.ops) or len(self._by_hf) != sum(len(op.hf) for op in self.ops):
            raise ValueError("two ops own the same parameter name")

    def __iter__(self) -> Iterator[WeightOp]:
        return iter(self.ops)

    def to_hf(self, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
        """One full megatron parameter -> its HF parameters. Values are moved, never changed."""
        op = self._by_megatron.get(name)
        if op is None:
            raise KeyError(f"no weight op owns megatron parameter '{name}'")
        return list(zip(op.hf, op.split(tensor), strict=True))

    def from_hf(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """HF parameters -> full megatron parameters. Raises KeyError for an unknown name or an incomplete set.

        Any subset works as long as the parts of one megatron parameter come together, so a checkpoint can be streamed.
        """
        unknown = [name for name in tensors if name not in self._by_hf]
        if unknown:
            raise KeyError(f"no weight op owns HF parameter '{unknown[0]}'")
        result: dict[str, Tensor] = {}
        for op in dict.fromkeys(self._by_hf[name] for name in tensors):
            missing = [name for name in op.hf if name not in tensors]
            if missing:
                raise KeyError(f"megatron parameter '{op.megatron}' also needs HF parameter '{missing[0]}'")
            result[op.megatron] = op.join(tuple(tensors[name] for name in op.hf))
        return result
