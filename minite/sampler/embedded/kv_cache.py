"""Keys, values and expert choices of the live requests, by slot: one slot per token, one contiguous range per request.

A contiguous range needs no page table: the slots of a request are ``start + position``. The price is fragmentation,
which can delay an admission but never block one for good, since an idle cache is one range again.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass

import torch
from torch import Tensor

from minite.backends.base import Fused
from minite.config.schema import ModelConfig
from minite.layers import ops


class Ranges:
    """First-fit allocator of contiguous slot ranges."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.used = 0
        self._free = [(0, size)]  # (start, length), by start, never adjacent

    def take(self, length: int) -> int | None:
        """Start of a free range of that length, now taken; None when there is none at present."""
        for i, (start, free) in enumerate(self._free):
            if free >= length:
                self._free[i : i + 1] = [(start + length, free - length)] if free > length else []
                self.used += length
                return start
        return None

    def give(self, start: int, length: int) -> None:
        """Free a range that ``take`` returned, joining it to its free neighbours."""
        insort(self._free, (start, length))
        self.used -= length
        at = self._free.index((start, length))
        for i in (at, at - 1):  # the right neighbour first, so that the index of the left one stays valid
            if 0 <= i < len(self._free) - 1:
                (a, a_len), (b, b_len) = self._free[i], self._free[i + 1]
                if a + a_len == b:
                    self._free[i : i + 2] = [(a, a_len + b_len)]


class KVCache:
    """Keys and values of all layers, and the experts that each token was routed to.

    A plan with ``kv_cache: fp8`` stores E4M3 codes (layers/kv.py), otherwise the model's dtype.
    """

    def __init__(self, model: ModelConfig, kv_cache: str, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.fp8, self.dtype, self.slots = kv_cache == "fp8", dtype, slots
        shape = (slots + 1, model.num_kv_heads, model.head_dim)  # the last: for rows that only pad a batch
        stored = torch.float8_e4m3fn if self.fp8 else dtype
        self.k = [torch.zeros(shape, dtype=stored, device=device) for _ in range(model.num_layers)]
        self.v = [torch.zeros(shape, dtype=stored, device=device) for _ in range(model.num_layers)]
        moe_layers = model.num_layers if model.num_experts else 0
        chosen = (slots + 1, moe_layers, model.experts_per_token)
        self.experts = torch.full(chosen, -1, dtype=torch.int16, device=device)

    def stored(self, x_THD: Tensor) -> Tensor:
        """Keys or values in the form the cache holds."""
        return ops.quantize_kv(x_THD) if self.fp8 else x_THD

    def read(self, x_THD: Tensor) -> Tensor:
        """The stored form as attention sees it, in the model's dtype."""
        return ops.dequantize_kv(x_THD, self.dtype) if self.fp8 else x_THD

    def read_experts(self, start: int, length: int) -> Tensor:
        """A copy on the CPU of the experts of ``length`` tokens, int16 [length, MoE layers, k]."""
        return torch.from_numpy(self.experts[start : start + length].cpu().numpy().copy())


@dataclass(frozen=True)
class Prefill:
    """Attention of whole prompts, packed end to end: over the new keys and values, which it also stores.

    Requests with one prompt share its computation: packed token ``source_N[i]`` goes to slot ``slot_N[i]``.
    """

    cache: KVCache
    cu_seqlens: Tensor  # int64 [prompts + 1]
    source_N: Tensor
    slot_N: Tensor
    scale: float
    strict: bool
    fused: Fused | None = None

    def pools(self, layer: int) -> None:
        """None: nothing is written at once."""

    def __call__(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        k_THD, v_THD = self.cache.stored(k_THD), self.cache.stored(v_THD)
        self.cache.k[layer][self.slot_N], self.cache.v[layer][self.slot_N] = k_THD[self.source_N], v_THD[self.source_N]
        k_THD, v_THD = self.cache.read(k_THD), self.cache.read(v_THD)
        return ops.attention(q_THD, k_THD, v_THD, self.cu_seqlens, self.scale, self.strict, self.fused)


@dataclass(frozen=True)
class Score:
    """Attention of whole sequences, packed end to end, as a prefill computes it; nothing is stored."""

    cache: KVCache
    cu_seqlens: Tensor  # int64 [sequences + 1]
    scale: float
    strict: bool
    fused: Fused | None = None

    def pools(self, layer: int) -> None:
        """None: nothing is written at once."""

    def __call__(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        k_THD, v_THD = (self.cache.read(self.cache.stored(x_THD)) for x_THD in (k_THD, v_THD))
        return ops.attention(q_THD, k_THD, v_THD, self.cu_seqlens, self.scale, self.strict, self.fused)


@dataclass(frozen=True)
class Decode:
    """Attention of one new token per sequence over all that the cache holds of it."""

    cache: KVCache
    slot_B: Tensor  # of the new tokens
    # of all tokens so far, L up to the longest; what lies beyond a sequence's length is not used. None: fused only
    slot_BL: Tensor | None
    length_B: Tensor
    scale: float
    strict: bool
    fused: Fused | None = None

    def pools(self, layer: int) -> tuple[Tensor, Tensor, Tensor] | None:
        """Where new keys and values go as they are."""
        return None if self.cache.fp8 else (self.cache.k[layer], self.cache.v[layer], self.slot_B)

    def __call__(self, layer: int, q_BHD: Tensor, k_BHD: Tensor, v_BHD: Tensor) -> Tensor:
        k_pool, v_pool = self.cache.k[layer], self.cache.v[layer]
        if k_BHD is not k_pool:
            k_pool[self.slot_B], v_pool[self.slot_B] = self.cache.stored(k_BHD), self.cache.stored(v_BHD)
        if self.fused is not None:
            first_B = self.slot_B - self.length_B + 1
            out_BHD = self.fused.attention_decode(q_BHD, k_pool, v_pool, first_B, self.length_B, self.scale)
            if out_BHD is not None:
                return out_BHD
        assert self.slot_BL is not None, "a backend that decodes these heads did not"
        k_BLHD, v_BLHD = k_pool[self.slot_BL], v_pool[self.slot_BL]
        return ops.attention_decode(q_BHD, k_BLHD, v_BLHD, self.length_B, self.scale, self.strict)
