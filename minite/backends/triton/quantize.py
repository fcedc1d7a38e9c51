"""NVFP4 quantizers and read-back: byte for byte what minite.formats.nvfp4 defines, one pass over memory each.

A row-scaled operand is read once. Outer scales of a tensor or an expert need the amax first, hence a second read.

NaN and Inf: the amax of whatever holds one is NaN or Inf, and so is then every result that it scales. Nothing here
waits for the device to look; callers who want an error check the amax.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite.backends.triton.rounding import e2m1_unpacked, max_nan, outer_encode
from minite.backends.triton.tiles import Tiles, block_index, chunk_amax, load_blocks, store_blocks, store_quantized
from minite.formats import QTensor
from minite.formats.nvfp4 import OUTER_MAX

_AMAX_TILE = 8192


@triton.jit
def _quantize_kernel(
    x, amax, codes, scales, values, rows, rows_per_amax, K,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
    MEASURE: tl.constexpr, BLOCK_ROWS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    halves = ()
    for c in tl.static_range(CHUNKS):
        block, inside = block_index(row, rows, c, K, BLOCKS, EVEN)
        halves = halves + load_blocks(x, block, inside)
    if MEASURE:
        outer = chunk_amax(halves[0], halves[1])
        for c in tl.static_range(1, CHUNKS):
            outer = max_nan(outer, chunk_amax(halves[2 * c], halves[2 * c + 1]))
        tl.store(amax + row, outer, row < rows)
    else:
        outer = tl.load(amax + row // rows_per_amax, row < rows, other=0)
    s_enc = outer_encode(outer)
    for c in tl.static_range(CHUNKS):
        block, inside = block_index(row, rows, c, K, BLOCKS, EVEN)
        store_quantized(halves[2 * c], halves[2 * c + 1], s_enc, codes, scales, values, block, inside, BLOCK_ROWS)


@triton.jit
def _amax_kernel(x, amax, size, TILE: tl.constexpr):
    """amax[e] = max |x| over x[e], size elements each. Bits of magnitudes order like integers, NaN above Inf."""
    expert = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    part = tl.load(x + expert * size + at, at < size, other=0).to(tl.float32)
    tl.atomic_max(amax + expert, tl.max(part.to(tl.int32, bitcast=True) & 0x7FFFFFFF), sem="relaxed")


@triton.jit
def _read_kernel(
    codes, scales, values, rows, K,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    for c in tl.static_range(CHUNKS):
        block, inside = block_index(row, rows, c, K, BLOCKS, EVEN)
        at = codes + block[:, :, None] * 8 + tl.arange(0, 4)[None, None, :]
        mask = tl.broadcast_to(inside[:, :, None], at.shape)
        scale = tl.load(scales + block, inside).to(tl.float32)[:, :, None]
        low, high = e2m1_unpacked(tl.load(at, mask, other=0)), e2m1_unpacked(tl.load(at + 4, mask, other=0))
        store_blocks(values, low * scale, high * scale, block, inside)


def outer_amax(x: Tensor, outer: str) -> Tensor:
    """max |x|: float32 [] of x, or [E] of x [E, N, K] with outer "expert"; NaN or Inf where x holds one."""
    x = x.contiguous()
    experts = x.shape[0] if outer == "expert" else 1
    amax_E = torch.zeros(experts, dtype=torch.float32, device=x.device)
    size = x.numel() // experts if experts else 0
    if size:
        grid = (triton.cdiv(size, _AMAX_TILE), experts)
        _amax_kernel[grid](x, amax_E.view(torch.int32), size, TILE=_AMAX_TILE, num_warps=8)
    return amax_E if outer == "expert" else amax_E[0]


def quantize(x: Tensor, block: tuple[int, int], outer: str, amax: Tensor | None = None) -> QTensor:
    """x [.., rows, K] with K % 16 == 0 as codes and scales. amax: as in formats.nvfp4.quantize, not checked here."""
    x = x.contiguous()
    *lead, rows, k = x.shape
    codes = torch.empty(*lead, rows, k // 2, dtype=torch.uint8, device=x.device)
    scales = torch.empty(*lead, rows, k // 16, dtype=torch.float8_e4m3fn, device=x.device)
    if amax is None and outer != "row":
        amax = outer_amax(x, outer)
    amax = _launch(x, block[0], outer, amax, codes, scales, None)
    return QTensor("nvfp4", codes, scales, amax, tuple(x.shape), block, outer_max=OUTER_MAX)


def fake_quantize(x: Tensor, outer: str, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(codes x block scales in bfloat16 [*shape], amax) of x in 1x16 blocks: quantize and read-back in one pass."""
    x = x.contiguous()
    values = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device)
    if amax is None and outer != "row":
        amax = outer_amax(x, outer)
    return values, _launch(x, 1, outer, amax, None, None, values)


def block_scaled(q: QTensor) -> Tensor:
    """codes x block scales of an NVFP4 tensor, bfloat16 [*shape]; exact."""
    values = torch.empty(q.shape, dtype=torch.bfloat16, device=q.device)
    k = q.shape[-1]
    if values.numel():
        tiles, rows = Tiles.whole_rows(k), values.numel() // k
        grid = (triton.cdiv(rows, tiles.rows),)
        _read_kernel[grid](q.codes.contiguous(), q.block_scale.contiguous(), values, rows, k, **tiles.constants)
    return values


def _launch(
    x: Tensor,
    block_rows: int,
    outer: str,
    amax: Tensor | None,
    codes: Tensor | None,
    scales: Tensor | None,
    values: Tensor | None,
) -> Tensor:
    """Runs the kernel over x [.., rows, K]; returns the amax that the codes belong to."""
    k = x.shape[-1]
    rows = x.numel() // k
    measure = amax is None
    if amax is None:
        amax = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    amax = amax.contiguous()
    if rows:
        tiles = Tiles.whole_rows(k, block_rows, blocks_per_thread=2 if codes is None else 4)
        per_amax = rows // amax.numel()
        _quantize_kernel[(triton.cdiv(rows, tiles.rows),)](
            x, amax, codes, scales, values, rows, per_amax, k,
            MEASURE=measure, BLOCK_ROWS=block_rows, **tiles.constants,
        )  # fmt: skip
    return amax
