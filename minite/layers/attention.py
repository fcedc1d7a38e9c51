"""Causal attention with grouped KV heads: packed sequences (learner, prefill) and one token per sequence (decode).

Softmax and both products are computed in FP32 from the stored operands, in FP64 in strict mode and on every CPU; the
output is rounded once to the dtype of q. In FP64 decoding token by token therefore gives the packed result bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minite.backends.base import Fused
from minite.layers.pointwise import work_dtype


def _attention_dtype(strict: bool, device: torch.device) -> torch.dtype:
    """FP64 on a CPU whatever the alignment: prefill and decode are two kernels there, whose FP32 sums differ in bits.

    One bit of BF16 moves FP4 codes in every layer behind it. On a GPU the backend's kernel serves both shapes instead.
    """
    return work_dtype(strict or device.type == "cpu")


@dataclass(frozen=True)
class _Bucket:
    """Sequences of similar length, laid out as a padded batch of ``rows`` x ``width`` slots."""

    token_n: Tensor  # packed index of each token
    slot_n: Tensor  # its slot, row * width + position
    rows: int
    width: int


def _length_buckets(cu_seqlens: Tensor) -> list[_Bucket]:
    """Buckets by power of two, so that at most half of the slots are padding, whatever the mix of lengths."""
    starts_S, lengths_S = cu_seqlens[:-1], cu_seqlens.diff()
    size_class_S = torch.log2(lengths_S.clamp(min=1).double()).ceil()
    buckets = []
    for size_class in sorted(set(size_class_S[lengths_S > 0].tolist())):
        member_s = ((size_class_S == size_class) & (lengths_S > 0)).nonzero().squeeze(-1)
        length_s = lengths_S[member_s]
        width = int(length_s.max())
        row_n = torch.repeat_interleave(torch.arange(len(member_s), device=cu_seqlens.device), length_s)
        position_n = torch.arange(len(row_n), device=cu_seqlens.device) - (length_s.cumsum(0) - length_s)[row_n]
        token_n = starts_S[member_s][row_n] + position_n
        buckets.append(_Bucket(token_n, row_n * width + position_n, len(member_s), width))
    return buckets


class _FusedAttention(torch.autograd.Function):
    """The backend's kernel forward; backward the derivative of the steps, computed anew from q, k and v."""

    @staticmethod
    def forward(
        ctx: Any, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, cu_seqlens: Tensor, scale: float, fused: Fused
    ) -> Tensor:
        ctx.save_for_backward(q_THD, k_THD, v_THD, cu_seqlens)
        ctx.scale = scale
        out_THD = fused.attention(q_THD, k_THD, v_THD, cu_seqlens, scale)
        return attention(q_THD, k_THD, v_THD, cu_seqlens, scale, strict=False) if out_THD is None else out_THD

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        *stored, cu_seqlens = ctx.saved_tensors
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in stored]
            out_THD = attention(*leaves, cu_seqlens, ctx.scale, strict=False)
            return *torch.autograd.grad(out_THD, leaves, grads[0]), None, None, None


def attention(
    q_THD: Tensor,
    k_THD: Tensor,
    v_THD: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    strict: bool,
    fused: Fused | None = None,
) -> Tensor:
    """softmax(scale * q k^T) v within each packed sequence, causal. -> [T, H, D], the dtype of q. Differentiable.

    q [T, H, D]; k and v [T, Hkv, D] with H a multiple of Hkv (query head h reads KV head h // (H / Hkv)).
    ``cu_seqlens`` int64 [S + 1], first 0, last T, on the device of q; empty sequences are allowed.
    ``fused``: the backend's kernel, which a sampler then decodes with too; not for strict.
    """
    if fused is not None:
        out: Tensor = _FusedAttention.apply(q_THD, k_THD, v_THD, cu_seqlens, scale, fused)
        return out
    work = _attention_dtype(strict, q_THD.device)
    buckets = _length_buckets(cu_seqlens.to(q_THD.device))
    if not buckets:
        return q_THD.clone()
    outputs = []
    for bucket in buckets:
        # Padding is on the right and zero: the causal mask hides it from every real query. index_copy rather than a
        # gather with repeated pad indices, because its gradient is free of atomic sums.
        def padded(x_THD: Tensor, bucket: _Bucket = bucket) -> Tensor:
            zeros = torch.zeros(bucket.rows * bucket.width, *x_THD.shape[1:], dtype=work, device=x_THD.device)
            filled = zeros.index_copy(0, bucket.slot_n, x_THD[bucket.token_n].to(work))
            return filled.view(bucket.rows, bucket.width, *x_THD.shape[1:]).transpose(1, 2)

        out_SHLD = F.scaled_dot_product_attention(
            padded(q_THD), padded(k_THD), padded(v_THD), is_causal=True, scale=scale, enable_gqa=True
        )
        outputs.append(out_SHLD.transpose(1, 2).flatten(0, 1)[bucket.slot_n].to(q_THD.dtype))
    token_T = torch.cat([bucket.token_n for bucket in buckets])
    return torch.zeros_like(q_THD).index_copy(0, token_T, torch.cat(outputs))


def attention_decode(
    q_BHD: Tensor,
    k_cache_BLHD: Tensor,
    v_cache_BLHD: Tensor,
    lengths_B: Tensor,
    scale: float,
    strict: bool,
    fused: Fused | None = None,
) -> Tensor:
    """Attention of one new token per sequence over its cached keys and values. -> [B, H, D], the dtype of q.

    Caches [B, L, Hkv, D] in any dtype that upcasts exactly (BF16, FP32, or FP8 codes of kv.quantize_kv); the new
    token's own key and value are already in. Only the first ``lengths_B[b]`` (>= 1) positions are read: what lies
    beyond may be anything, NaN included. Cut L to the longest live sequence before the call: work is B * L.
    ``fused``: the backend's kernel, the bits of ``attention`` with it; not for strict.
    """
    if fused is not None:
        first_B = torch.arange(len(q_BHD), device=q_BHD.device) * k_cache_BLHD.shape[1]
        pools = k_cache_BLHD.flatten(0, 1), v_cache_BLHD.flatten(0, 1)
        out_BHD = fused.attention_decode(q_BHD, *pools, first_B, lengths_B.to(q_BHD.device), scale)
        if out_BHD is not None:
            return out_BHD
    work = _attention_dtype(strict, q_BHD.device)
    batch, heads, head_dim = q_BHD.shape
    kv_heads, length = k_cache_BLHD.shape[2], k_cache_BLHD.shape[1]
    valid_BL = torch.arange(length, device=q_BHD.device) < lengths_B.to(q_BHD.device)[:, None]
    q_BhGD = q_BHD.to(work).view(batch, kv_heads, heads // kv_heads, head_dim)
    stored = v_cache_BLHD if v_cache_BLHD.dtype.itemsize > 1 else v_cache_BLHD.to(q_BHD.dtype)
    v_cache_BLHD = stored.masked_fill(~valid_BL[:, :, None, None], 0.0)  # 0 * NaN is NaN; narrow, so cheap
    k_BhLD, v_BhLD = (  # contiguous here, or each product below would copy what it is given
        cache.transpose(1, 2).to(work, memory_format=torch.contiguous_format) for cache in (k_cache_BLHD, v_cache_BLHD)
    )
    score_BhGL = (q_BhGD @ k_BhLD.transpose(2, 3)).mul_(scale)
    score_BhGL.masked_fill_(~valid_BL[:, None, None, :], float("-inf"))
    return (score_BhGL.softmax(dim=-1) @ v_BhLD).view(batch, heads, head_dim).to(q_BHD.dtype)
