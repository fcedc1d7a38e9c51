"""GEMMs straight from packed NVFP4 weights, 4.5 bits an element, dense and by expert: what decode needs. sm_90.

    out = cast( (acc * alpha) * (a_amax[row] * b_amax[expert]) )        as in grouped.py; packed.cu is the kernel

Layout, made once per weight version. A warp owns 16 rows; of each 16 columns of them a thread holds the 8 values that
wgmma wants it to hold (PTX ISA, "wgmma.mma_async": register fragments of A): rows g and g + 8, columns 2t, 2t + 1 and
8 more, with lane = 4 g + t. Their codes are one word, and words of 64 columns are 16 bytes, one load.

In a word the bits of a pair of codes stand so that a shift and a mask put both signs at bit 15 and both magnitudes at
bits 8..6 of two BF16 numbers: 2^-126 times their values. Scales are bytes of 5 exponent and 3 mantissa bits, one
instruction away from 2^118 times theirs in BF16; the product of both is exact, and alpha takes the 2^-8.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite.backends.reference import Prepared
from minite.backends.triton import grouped, nvrtc
from minite.backends.triton.quantize import block_scaled
from minite.formats import QTensor

ARCHITECTURE = (9, 0)
_SHARED = 227 * 1024  # bytes a multiprocessor lends to one program
_WORDS = 1024
_WIDTHS = (8, 16, 24, 32, 48, 64, 80, 152)  # token tiles; each is compiled when first needed
_WIDTH_OF_MANY = 96  # the widest of which two programs fit on a multiprocessor
DEQUANTIZE_ROWS = 512  # rows an expert from which on dequantizing the weight first costs less than doing it by tile


@dataclass(frozen=True)
class Packed:
    """An NVFP4 weight as packed.cu reads it."""

    codes: Tensor  # int32 [E, N / 16, K / 64, 32 lanes, 4]
    scales: Tensor  # uint8 [E, N / 16, K / 128, 8 g, 8 blocks, 2 (g, g + 8)]
    amax: Tensor  # float32 [E], or [] of a matrix
    outer_max: float
    source: QTensor  # the same weight as it came, for products so large that dequantizing it first is faster

    @property
    def experts(self) -> int:
        return self.codes.shape[0]

    @property
    def n(self) -> int:
        return self.source.shape[-2]

    @property
    def k(self) -> int:
        return self.source.shape[-1]


@dataclass(frozen=True)
class Tile:
    """Launch parameters of packed.cu."""

    tokens: int  # of a tile
    warpgroups: int  # 64 rows of the weight each
    stages: int = 0  # slots of 128 columns; 0: see slots

    @classmethod
    def choose(cls, rows: int, experts: int) -> Tile:
        """Wide enough for the rows of most experts, routed at random: each tile of an expert dequantizes its weight."""
        mean = rows / experts
        most = mean + 2 * mean**0.5 if experts > 1 else mean
        tokens = next((width for width in _WIDTHS if most <= width), _WIDTH_OF_MANY)
        return cls(tokens, 1 if experts == 1 or tokens == _WIDTHS[0] else 2)

    @property
    def slot(self) -> int:
        """Bytes of one slot, as packed.cu computes them."""
        return -(-(256 * self.tokens + 72 * 64 * self.warpgroups) // 1024) * 1024

    @property
    def slots(self) -> int:
        """Four, or fewer where two programs then share a multiprocessor: one multiplies while the other waits."""
        for_two = _SHARED // 2 // self.slot
        return self.stages or min(4, for_two if for_two >= 3 else _SHARED // self.slot)


def fits(q: QTensor) -> bool:
    """Whether packed.cu can read this weight, which is on a GPU."""
    n, k = q.shape[-2:]
    readable = q.format == "nvfp4" and q.outer in ("tensor", "expert") and n % 16 == 0 and k % 128 == 0
    return readable and torch.cuda.get_device_capability(q.device) == ARCHITECTURE


def takes(a: Prepared, out_dtype: torch.dtype) -> bool:
    """Whether packed.cu multiplies these rows."""
    return a.values.dtype == torch.bfloat16 and out_dtype in (torch.bfloat16, torch.float32)


@triton.jit
def _placed(byte, s: tl.constexpr, e1: tl.constexpr, low: tl.constexpr):
    """Of both codes of a byte: sign, upper exponent bit and lower two bits at bits s, e1 and low; odd ones 16 up."""
    both = (byte & 15) | ((byte >> 4) << 16)
    return (((both >> 3) & 0x10001) << s) | (((both >> 2) & 0x10001) << e1) | ((both & 0x30003) << low)


@triton.jit(do_not_specialize=["count"])
def _pack_kernel(codes, scales, words, count, K, BLOCK: tl.constexpr):
    """One word for each (strip of 16 rows, 64 columns, lane, 16 columns); its four bytes are two columns each."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = i < count
    b, t, g, rest = i % 4, i // 4 % 4, i // 16 % 8, i // 128
    column16, strip = rest % (K // 64) * 4 + b, rest // (K // 64)
    word = tl.zeros((BLOCK,), tl.int32)
    for pair in tl.static_range(4):  # rows g, g + 8; then 8 columns further on
        row = strip * 16 + g + pair % 2 * 8
        byte = tl.load(codes + row * (K // 2) + column16 * 8 + pair // 2 * 4 + t, inside, other=0).to(tl.int32)
        scale = tl.load(scales + row * (K // 16) + column16, inside, other=0)
        byte = tl.where(scale == 0, 0, byte)  # packed.cu has no scale of zero
        if pair == 0:
            word |= _placed(byte, 15, 8, 6)
        elif pair == 1:
            word |= _placed(byte, 12, 5, 3)
        elif pair == 2:
            word |= _placed(byte, 9, 2, 0)
        else:
            word |= _placed(byte, 14, 13, 10)
    tl.store(words + i, word, inside)


def pack(q: QTensor) -> Packed:
    """The packed form of an NVFP4 weight [N, K] or [E, N, K] of a shape that ``fits``."""
    *lead, n, k = q.shape
    experts = lead[0] if lead else 1
    assert q.block_scale is not None and q.amax is not None
    scales = q.block_scale.contiguous().view(torch.uint8)
    words = torch.empty(experts, n // 16, k // 64, 32, 4, dtype=torch.int32, device=q.device)
    grid = (triton.cdiv(words.numel(), _WORDS),)
    _pack_kernel[grid](q.codes.contiguous(), scales, words, words.numel(), k, BLOCK=_WORDS)
    return Packed(words, pack_scales(scales.view(experts, n, k // 16)), q.amax.contiguous(), q.outer_max, q)


def pack_scales(scales_ENb: Tensor) -> Tensor:
    """E4M3 bytes [E, N, K / 16] -> E5M3 bytes, exponent bias 21, in the order of Packed.scales.

    The wider exponent has no subnormals: the E4M3 ones, m * 2^-9, become normal.
    """
    subnormal = torch.tensor([0, 96, 104, 108, 112, 114, 116, 118], dtype=torch.uint8, device=scales_ENb.device)
    wide = torch.where(scales_ENb < 8, subnormal[(scales_ENb & 7).int()], scales_ENb + 112)
    experts, n, blocks = wide.shape
    return wide.view(experts, n // 16, 2, 8, blocks // 8, 8).permute(0, 1, 4, 3, 5, 2).contiguous()


def gemm(
    a: Prepared, b: Packed, out_dtype: torch.dtype, rows_E: Tensor | None = None, tile: Tile | None = None
) -> Tensor:
    """[R, N] in out_dtype (bfloat16, float32): as grouped.gemm, with a packed weight. rows_E: None for a matrix.

    a: bfloat16 [R, K], contiguous, on a 16-byte address, with an amax or without.
    """
    rows, device = a.values.shape[0], a.values.device
    out_RN = torch.empty(rows, b.n, dtype=out_dtype, device=device)
    if not rows:
        return out_RN
    if tile is None and rows >= DEQUANTIZE_ROWS * b.experts:
        values_ENK = block_scaled(b.source).view(b.experts, b.n, b.k)
        return grouped.gemm(a, Prepared(values_ENK, b.amax, b.outer_max), out_dtype, rows_E)
    tile = tile or Tile.choose(rows, b.experts)
    tiles = -(-rows // tile.tokens)
    if rows_E is not None:
        rows_E, tiles = rows_E.to(torch.int64).contiguous(), rows // tile.tokens + b.experts
    a_amax = None if a.amax is None else a.amax.expand(rows).contiguous()
    kernel = nvrtc.compiled(
        source(tile, out_dtype == torch.float32), "packed_gemm", 128 * tile.warpgroups, tile.slot * tile.slots,
        "sm_90a", device.index,
    )  # fmt: skip
    alpha = float(torch.tensor(1 / (a.outer_max * b.outer_max), dtype=torch.float32)) * 2**8
    kernel(
        (-(-b.n // (64 * tile.warpgroups)), tiles),
        (a.values, b.codes, b.scales, out_RN, a_amax, b.amax, rows_E, b.experts, rows, b.n, b.k, alpha),
    )
    return out_RN


@cache
def source(tile: Tile, out_float: bool) -> str:
    """packed.cu for one tile. The wgmma of its width has as many operands as accumulators, hence made here."""
    count = tile.tokens // 2
    d = ", ".join(f"%{i}" for i in range(count))
    a = ", ".join(f"%{count + i}" for i in range(4))
    outputs = ", ".join(f'"+f"(d[{i}])' for i in range(count))
    return f"""
#define TOKENS {tile.tokens}
#define WARPGROUPS {tile.warpgroups}
#define STAGES {tile.slots}
#define OUT_FLOAT {int(out_float)}
__device__ __forceinline__ void wgmma(
    float (&d)[{count}], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned long long b) {{
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n{tile.tokens}k16.f32.bf16.bf16 {{{d}}}, {{{a}}}, %{count + 4}, 1, 1, 1, 0;"
        : {outputs} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));
}}
{Path(__file__).with_name("packed.cu").read_text(encoding="utf-8")}"""
