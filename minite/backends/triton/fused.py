"""What stands between the GEMMs of a block, fused with the quantizer of the next one: RMS norm and SwiGLU.

Each rounds its result to BF16 where layers.pointwise does and quantizes what was rounded. Their arithmetic is FP32 and
in the order stated. Squares of BF16 numbers are summed in FP64, which holds such a sum exactly unless the numbers span
more than 2^14: so a norm has one value, whatever the order, the kernel and the batch.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from minite.backends.triton.rounding import max_nan, outer_encode
from minite.backends.triton.tiles import Tiles, block_index, chunk_amax, load_blocks, store_blocks, store_quantized

_ROUND_ASM = tl.constexpr("{ .reg .b32 t; cvt.rn.bf16x2.f32 t, $3, $2; shl.b32 $0, t, 16; and.b32 $1, t, 0xFFFF0000; }")


@triton.jit
def rounded(x):
    """float32 rounded to BF16, two at a time; still float32."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.inline_asm_elementwise(_ROUND_ASM, "=&r,=r,r,r", [bits], dtype=tl.int32, is_pure=True, pack=2)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _silu_times(gate, up):
    """silu(gate) * up rounded to BF16, to the bit of torch's where |gate| >= 2^-120.

    The division is the fast path of div.rn without its branch: an approximate reciprocal, one Newton step, two
    remainders. A quarter of both sides keeps the reciprocal of the largest denominator a normal number.
    """
    a = gate * 0.25
    b = tl.fma(libdevice.exp(-gate), 0.25, 0.25)
    r = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [b], dtype=tl.float32, is_pure=True, pack=1)
    r = tl.fma(r, tl.fma(-b, r, 1.0), r)
    q = a * r
    q = tl.fma(tl.fma(-b, q, a), r, q)
    q = tl.fma(tl.fma(-b, q, a), r, q)
    return rounded(tl.where(b == float("inf"), a * 0.0, q) * up)


@triton.jit
def _swiglu_kernel(
    gate_up, factor, plain, amax, codes, scales, values, rows, K,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    outer = tl.zeros((ROWS,), tl.float32)
    if factor is not None:
        scale = tl.load(factor + row, row < rows, other=0)[:, None, None]
    halves = ()
    for c in tl.static_range(CHUNKS):
        block, inside = block_index(row, rows, c, K, BLOCKS, EVEN)
        gate_block = block + row[:, None].to(tl.int64) * (K // 16)  # rows of gate_up are twice as long
        gate_low, gate_high = load_blocks(gate_up, gate_block, inside)
        up_low, up_high = load_blocks(gate_up, gate_block + K // 16, inside)
        if factor is not None:
            gate_low, gate_high, up_low, up_high = gate_low * scale, gate_high * scale, up_low * scale, up_high * scale
        low, high = _silu_times(gate_low, up_low), _silu_times(gate_high, up_high)
        outer = max_nan(outer, chunk_amax(low, high))
        halves = halves + (low, high)
        if plain is not None:
            store_blocks(plain, low, high, block, inside)
    if amax is not None:
        tl.store(amax + row, outer, row < rows)
        s_enc = outer_encode(outer)
        for c in tl.static_range(CHUNKS):
            block, inside = block_index(row, rows, c, K, BLOCKS, EVEN)
            store_quantized(halves[2 * c], halves[2 * c + 1], s_enc, codes, scales, values, block, inside, 1)


@triton.jit
def _load_weight(weight, c, K, BLOCKS: tl.constexpr, EVEN: tl.constexpr):
    """The halves [1, BLOCKS, 8] of chunk c of a vector [K]."""
    block, inside = block_index(tl.zeros((1,), tl.int32), 1, c, K, BLOCKS, EVEN)
    return load_blocks(weight, block, inside)


@triton.jit
def squares(x):
    """float64 x^2 of float32 that hold BF16 numbers."""
    return x.to(tl.float64) * x.to(tl.float64)


@triton.jit
def inverse_rms(square, K, eps):
    """1 / sqrt(mean + eps) of sums of squares float64 [rows]: float32."""
    one = tl.full(square.shape, 1.0, tl.float32)
    return tl.div_rn(one, tl.sqrt_rn(tl.div_rn(square.to(tl.float32), one * K) + eps))


@triton.jit
def _rms_norm_kernel(
    x, addend, weight, eps, total, plain, amax, codes, scales, values, rows, K,
    ROWS: tl.constexpr, BLOCKS: tl.constexpr, CHUNKS: tl.constexpr, EVEN: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    halves = ()
    square = tl.zeros((ROWS,), tl.float64)
    for c in tl.static_range(CHUNKS):
        block, inside = block_index(row, rows, c, K, BLOCKS, EVEN)
        low, high = load_blocks(x, block, inside)
        if addend is not None:
            more_low, more_high = load_blocks(addend, block, inside)
            low, high = rounded(low + more_low), rounded(high + more_high)
            store_blocks(total, low, high, block, inside)
        square += tl.sum(tl.sum(squares(low) + squares(high), 2), 1)
        halves = halves + (low, high)
    inverse = inverse_rms(square, K, eps)[:, None, None]
    outer = tl.zeros((ROWS,), tl.float32)
    normed = ()
    for c in tl.static_range(CHUNKS):
        weight_low, weight_high = _load_weight(weight, c, K, BLOCKS, EVEN)
        low = rounded(halves[2 * c] * inverse * weight_low)
        high = rounded(halves[2 * c + 1] * inverse * weight_high)
        outer = max_nan(outer, chunk_amax(low, high))
        normed = normed + (low, high)
    if amax is not None:
        tl.store(amax + row, outer, row < rows)
    s_enc = outer_encode(outer)
    for c in tl.static_range(CHUNKS):
        block, inside = block_index(row, rows, c, K, BLOCKS, EVEN)
        if plain is not None:
            store_blocks(plain, normed[2 * c], normed[2 * c + 1], block, inside)
        if amax is not None:
            store_quantized(normed[2 * c], normed[2 * c + 1], s_enc, codes, scales, values, block, inside, 1)


class Outputs:
    """What a fused kernel shall write, [rows, K] each: any of "plain" (BF16), "codes" (with scales), "values"."""

    def __init__(self, wanted: tuple[str, ...], rows: int, k: int, device: torch.device) -> None:
        def new(name: str, columns: int, dtype: torch.dtype) -> Tensor | None:
            return torch.empty(rows, columns, dtype=dtype, device=device) if name in wanted else None

        self.plain = new("plain", k, torch.bfloat16)
        self.codes = new("codes", k // 2, torch.uint8)
        self.scales = new("codes", k // 16, torch.float8_e4m3fn)
        self.values = new("values", k, torch.bfloat16)  # codes x block scales
        quantized = self.codes is not None or self.values is not None
        self.amax = torch.empty(rows, dtype=torch.float32, device=device) if quantized else None
        self.total: Tensor | None = None  # of rms_norm with an addend


def swiglu(gate_up_RK: Tensor, wanted: tuple[str, ...], factor_R: Tensor | None = None) -> Outputs:
    """silu(gate) * up of BF16 [R, 2 I], row-scaled. factor_R float32 [R] multiplies gate and up first, unrounded."""
    rows, k = gate_up_RK.shape[0], gate_up_RK.shape[1] // 2
    out = Outputs(wanted, rows, k, gate_up_RK.device)
    if rows:
        tiles = Tiles.whole_rows(k, blocks_per_thread=2 if out.codes is None else 4)
        _swiglu_kernel[(triton.cdiv(rows, tiles.rows),)](
            gate_up_RK, factor_R, out.plain, out.amax, out.codes, out.scales, out.values, rows, k, **tiles.constants
        )
    return out


def rms_norm(
    x_TK: Tensor, weight_K: Tensor, eps: float, wanted: tuple[str, ...], addend_TK: Tensor | None = None
) -> Outputs:
    """weight * x / sqrt(mean(x^2) + eps) of BF16 [T, K], row-scaled. x is ``total``, x + addend rounded, if given."""
    if not (x_TK.is_contiguous() and (addend_TK is None or addend_TK.is_contiguous())):
        raise ValueError(f"rms_norm: rows of stride {x_TK.stride(0)}, expected {x_TK.shape[1]}; pass x.contiguous()")
    rows, k = x_TK.shape
    out = Outputs(wanted, rows, k, x_TK.device)
    out.total = None if addend_TK is None else torch.empty_like(x_TK)
    if rows:
        tiles = Tiles.whole_rows(k, blocks_per_thread=2 if out.codes is None else 4)
        _rms_norm_kernel[(triton.cdiv(rows, tiles.rows),)](
            x_TK, addend_TK, weight_K, eps, out.total, out.plain, out.amax, out.codes, out.scales, out.values, rows, k,
            **tiles.constants,
        )  # fmt: skip
    return out
