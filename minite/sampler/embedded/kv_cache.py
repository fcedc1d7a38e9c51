"""Keys, values and expert choices of the live requests, by slot: one slot per token, one contiguous range per request.

A contiguous range needs no page table: the slots of a request are ``start + position``. The price is fragmentation,
which can delay an admission but never block one for good, since an idle cache is one range again.
"""

from __future__ import annotations

from bisect import insort

import torch
from torch import Tensor

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
        self.fp8, self.dtype = kv_cache == "fp8", dtype
        shape = (slots, model.num_kv_heads, model.head_dim)
        stored = torch.float8_e4m3fn if self.fp8 else dtype
        self.k = [torch.zeros(shape, dtype=stored, device=device) for _ in range(model.num_layers)]
        self.v = [torch.zeros(shape, dtype=stored, device=device) for _ in range(model.num_layers)]
        self.experts: Tensor | None = None  # int16 [slots, MoE layers, k]
        if model.num_experts:
            experts_shape = (slots, model.num_layers, model.experts_per_token)
            self.experts = torch.full(experts_shape, -1, dtype=torch.int16, device=device)

    def store(self, layer: int, slot_T: Tensor, k_THD: Tensor, v_THD: Tensor) -> tuple[Tensor, Tensor]:
        """Write the new tokens' keys and values; returns them as a later read would give them, in the model's dtype."""
        if self.fp8:
            k_THD, v_THD = ops.quantize_kv(k_THD), ops.quantize_kv(v_THD)
        self.k[layer][slot_T], self.v[layer][slot_T] = k_THD, v_THD
        if self.fp8:
            return ops.dequantize_kv(k_THD, self.dtype), ops.dequantize_kv(v_THD, self.dtype)
        return k_THD, v_THD


class Prefill:
    """Attention of whole prompts, packed end to end: over the new keys and values, which it also stores."""

    def __init__(self, cache: KVCache, slot_T: Tensor, cu_seqlens: Tensor, scale: float, strict: bool) -> None:
        self.cache, self.slot_T, self.cu_seqlens, self.scale, self.strict = cache, slot_T, cu_seqlens, scale, strict

    def __call__(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor:
        k_THD, v_THD = self.cache.store(layer, self.slot_T, k_THD, v_THD)
        return ops.attention(q_THD, k_THD, v_THD, self.cu_seqlens, self.scale, self.strict)


class Decode:
    """Attention of one new token per sequence over all that the cache holds of it."""

    def __init__(self, cache: KVCache, start_B: Tensor, length_B: Tensor, longest: int, scale: float, strict: bool) -> None:
        self.cache, self.length_B, self.scale, self.strict = cache, length_B, scale, strict
        self.slot_B = start_B + length_B - 1
        slots = cache.k[0].shape[0]
        span_L = torch.arange(longest, device=start_B.device)
        self.slot_BL = (start_B[:, None] + span_L).clamp(max=slots - 1)  # slots past a sequence's length are not read

    def __call__(self, layer: int, q_BHD: Tensor, k_BHD: Tensor, v_BHD: Tensor) -> Tensor:
        self.cache.store(layer, self.slot_B, k_BHD, v_BHD)
        k_BLHD, v_BLHD = self.cache.k[layer][self.slot_BL], self.cache.v[layer][self.slot_BL]
        return ops.attention_decode(q_BHD, k_BLHD, v_BLHD, self.length_B, self.scale, self.strict)
