"""Between the QKV GEMM and attention: norm of the heads of q and k, RoPE, and new keys and values to their places.

One pass. Norm and rotation round to BF16 each, as layers.pointwise does, and in its order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite.backends.triton.fused import inverse_rms, rounded, squares

_HEADS = 8  # of a program
_MAX_HALF = 128


@triton.jit
def _heads_kernel(
    qkv, q_weight, k_weight, cos, sin, eps, q, k, v, slot, H, KV,
    HALF: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    head, column = tl.program_id(1) * HEADS + tl.arange(0, HEADS), tl.arange(0, HALF)
    inside = (head < H + 2 * KV)[:, None] & (column >= 0)[None, :]
    is_q, is_v = (head < H)[:, None], (head >= H + KV)[:, None]
    at = qkv + (token * (H + 2 * KV) + head)[:, None] * (2 * HALF) + column[None, :]
    raw_low, raw_high = tl.load(at, inside, other=0), tl.load(at + HALF, inside, other=0)
    low, high = raw_low.to(tl.float32), raw_high.to(tl.float32)
    if q_weight is not None:
        inverse = inverse_rms(tl.sum(squares(low) + squares(high), 1), 2 * HALF, eps)[:, None]
        low_weight = tl.where(is_q, tl.load(q_weight + column)[None, :], tl.load(k_weight + column)[None, :])
        high_weight = tl.where(
            is_q, tl.load(q_weight + HALF + column)[None, :], tl.load(k_weight + HALF + column)[None, :]
        )
        low = rounded(low * inverse * low_weight.to(tl.float32))
        high = rounded(high * inverse * high_weight.to(tl.float32))
    c = tl.load(cos + token * HALF + column)[None, :]
    s = tl.load(sin + token * HALF + column)[None, :]
    low, high = low * c - high * s, high * c + low * s
    low = tl.where(is_v, raw_low, rounded(low).to(tl.bfloat16))
    high = tl.where(is_v, raw_high, rounded(high).to(tl.bfloat16))
    to = q + (token * H + head)[:, None] * (2 * HALF) + column[None, :]
    tl.store(to, low, inside & is_q)
    tl.store(to + HALF, high, inside & is_q)
    row = token if slot is None else tl.load(slot + token)
    to = k + (row * KV + head - H)[:, None] * (2 * HALF) + column[None, :]
    tl.store(to, low, inside & (~is_q) & (~is_v))
    tl.store(to + HALF, high, inside & (~is_q) & (~is_v))
    to = v + (row * KV + head - H - KV)[:, None] * (2 * HALF) + column[None, :]
    tl.store(to, low, inside & is_v)
    tl.store(to + HALF, high, inside & is_v)


def fits(dim: int) -> bool:
    """Whether the kernel takes heads of this size."""
    return dim % 2 == 0 and 8 <= dim // 2 <= _MAX_HALF and dim & (dim - 1) == 0


def heads(
    qkv_THD: Tensor,
    kv_heads: int,
    norms: tuple[Tensor, Tensor] | None,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    pools: tuple[Tensor, Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) of BF16 [T, heads + 2 KV heads, D]: RMS norm of the heads of q and of k, rotation; v as it is.

    norms: BF16 weights [D] of q and k. cos, sin: float32 [T, D / 2]. With pools (keys, values: BF16 [slots, KV heads,
    D], slots int64 [T]) k and v are written there instead, and those pools are what is returned.
    """
    tokens, total, dim = qkv_THD.shape
    q_heads = total - 2 * kv_heads
    q_THD = torch.empty(tokens, q_heads, dim, dtype=qkv_THD.dtype, device=qkv_THD.device)
    if pools is None:
        k, v = (q_THD.new_empty(tokens, kv_heads, dim) for _ in range(2))
        slot_T = None
    else:
        k, v, slot_T = pools
    q_norm, k_norm = (None, None) if norms is None else norms
    if tokens:
        _heads_kernel[(tokens, triton.cdiv(total, _HEADS))](
            qkv_THD, q_norm, k_norm, cos, sin, eps, q_THD, k, v, slot_T, q_heads, kv_heads,
            HALF=dim // 2, HEADS=_HEADS, num_warps=2 if dim >= 64 else 1, enable_fp_fusion=False,
        )  # fmt: skip
    return q_THD, k, v
