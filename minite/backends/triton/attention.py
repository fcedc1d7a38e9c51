"""Causal attention with grouped KV heads whose rows do not know of each other: prefill gives the bits of decode.

One kernel for both. A program holds tokens x query heads of one KV head, and walks over the keys from the first one, in
blocks; blocks beyond a row's position leave it as it is, to the bit. Where a key lies makes no difference: keys stand
in a row, or a list of slots says where each is, as SGLang's cache has it. The softmax is kept up as the blocks go by
(flash attention, arXiv 2205.14135, algorithm 1), in FP32; a probability enters the second product as the sum of two
BF16 numbers, so that it keeps 16 bits.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite.backends.triton.grouped import tile_table

_ROWS, _KEYS = 64, 64  # of a tile; a row of wgmma gives the same bits wherever in the tile it lies
_HEAD_DIMS = (16, 32, 64, 128, 256)


@triton.jit(do_not_specialize=["limit"])
def _attention_kernel(
    q, k, v, out, first, length, table, slots, before, limit, H, KV, scale,
    GROUP: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
):  # fmt: skip
    """first [S]: where the keys of a sequence begin, in the pools or, with slots, in that list of places in the pools.

    Decode (no table): query s is the last of length[s] tokens. before [S]: of a query at t the position is t + before;
    without it queries stand where their keys do.
    """
    kv_head, index = tl.program_id(1), tl.program_id(0)
    if table is None:
        sequence, token, end = index, index, index + 1
        position = tl.load(length + sequence).to(tl.int32) - 1
    else:
        if index >= tl.load(table + 3 * limit):
            return
        sequence, token = tl.load(table + index), tl.load(table + limit + index)
        end = tl.load(table + 2 * limit + index)
        if before is None:
            position = token - tl.load(first + sequence).to(tl.int32)
        else:
            position = token + tl.load(before + sequence).to(tl.int32)
    key_0 = tl.load(first + sequence).to(tl.int64)
    row, d = tl.arange(0, BM), tl.arange(0, D)
    head = row % PADDED
    inside = (token + row // PADDED < end) & (head < GROUP)
    at = (token + row // PADDED).to(tl.int64) * H + kv_head * GROUP + head
    x = tl.load(q + at[:, None] * D + d[None, :], inside[:, None], other=0.0)
    last = position + row // PADDED
    keys = position + tl.minimum(end - token, BM // PADDED)
    biggest = tl.full((BM,), float("-inf"), tl.float32)
    total = tl.zeros((BM,), tl.float32)
    acc = tl.zeros((BM, D), tl.float32)
    k += kv_head * D
    v += kv_head * D
    if slots is None:
        k += key_0 * (KV * D)
        v += key_0 * (KV * D)
    else:
        slots += key_0
    for start in range(0, keys, BN):
        column = start + tl.arange(0, BN)
        slot = column if slots is None else tl.load(slots + column, column < keys, other=0).to(tl.int64)
        there = slot[:, None] * (KV * D) + d[None, :]
        exists = (column < keys)[:, None]
        score = tl.dot(x, tl.load(k + there, exists, other=0.0).to(x.dtype).T) * scale
        score = tl.where(column[None, :] <= last[:, None], score, float("-inf"))
        bigger = tl.maximum(biggest, tl.max(score, 1))
        p = tl.exp2(score - bigger[:, None])
        shrink = tl.exp2(biggest - bigger)
        total = total * shrink + tl.sum(p, 1)
        values = tl.load(v + there, exists, other=0.0).to(x.dtype)
        high = p.to(x.dtype)
        acc = tl.dot(high, values, acc * shrink[:, None])
        acc = tl.dot((p - high.to(tl.float32)).to(x.dtype), values, acc)
        biggest = bigger
    acc = tl.div_rn(acc, tl.broadcast_to(total[:, None], (BM, D)))
    tl.store(out + at[:, None] * D + d[None, :], acc.to(out.dtype.element_ty), inside[:, None])


def fits(q_THD: Tensor, kv_heads: int) -> bool:
    """Whether the kernel takes these queries."""
    return q_THD.dtype == torch.bfloat16 and takes(q_THD.shape[1], kv_heads, q_THD.shape[2])


def takes(heads: int, kv_heads: int, dim: int) -> bool:
    """Whether the kernel takes heads of this number and size."""
    return dim in _HEAD_DIMS and heads // kv_heads <= _ROWS


def attention(q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor:
    """As layers.attention.attention: packed sequences, [T, H, D]. cu_seqlens: integers [S + 1] on the device."""
    return _prefill(q_THD, k_THD, v_THD, cu_seqlens, cu_seqlens.contiguous(), None, None, scale)


def attention_paged(
    q_THD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    cu_queries: Tensor,
    prefix_S: Tensor,
    first_S: Tensor,
    slots: Tensor,
    scale: float,
) -> Tensor:
    """The bits of ``attention`` for the last tokens of each sequence, whose keys are scattered over the pools.

    Sequence s has queries cu_queries[s] to cu_queries[s + 1], behind prefix_S[s] tokens that are in the pools already,
    as the queries' own keys are: token j of it at slots[first_S[s] + j] of the pools [slots, KV heads, D]. Integers.
    """
    return _prefill(q_THD, k_pool, v_pool, cu_queries, first_S, slots, prefix_S - cu_queries[:-1], scale)


def _prefill(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    cu_queries: Tensor,
    first_S: Tensor,
    slots: Tensor | None,
    before_S: Tensor | None,
    scale: float,
) -> Tensor:
    _, padded = _group(q_THD, k)
    table, limit = tile_table(cu_queries.diff(), len(q_THD), _ROWS // padded)
    return _launch(q_THD, k, v, first_S, None, table, slots, before_S, limit, scale)


def attention_decode(
    q_BHD: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    first_B: Tensor,
    length_B: Tensor,
    scale: float,
    slots: Tensor | None = None,
) -> Tensor:
    """One query per sequence over ``length_B`` keys that begin at ``first_B`` of the pools [slots, KV heads, D], or of
    ``slots``, which says where in the pools each is."""
    first_B, length_B = first_B.contiguous(), length_B.contiguous()
    return _launch(q_BHD, k_pool, v_pool, first_B, length_B, None, slots, None, len(q_BHD), scale)


def _group(q_THD: Tensor, k_THD: Tensor) -> tuple[int, int]:
    group = q_THD.shape[1] // k_THD.shape[1]
    return group, triton.next_power_of_2(group)


def _launch(
    q_THD: Tensor,
    k: Tensor,
    v: Tensor,
    first_S: Tensor,
    length_S: Tensor | None,
    table: Tensor | None,
    slots: Tensor | None,
    before_S: Tensor | None,
    programs: int,
    scale: float,
) -> Tensor:
    q_THD, k, v = q_THD.contiguous(), k.contiguous(), v.contiguous()
    out_THD = torch.empty_like(q_THD)
    (_, heads, dim), kv_heads = q_THD.shape, k.shape[1]
    group, padded = _group(q_THD, k)
    if programs:
        _attention_kernel[(programs, kv_heads)](
            q_THD, k, v, out_THD, first_S, length_S, table, slots, before_S, programs, heads, kv_heads,
            scale / math.log(2),
            GROUP=group, PADDED=padded, D=dim, BM=_ROWS, BN=_KEYS, num_warps=4, num_stages=3, enable_fp_fusion=False,
        )  # fmt: skip
    return out_THD
