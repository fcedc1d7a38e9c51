"""Device functions: NVFP4 arithmetic in registers, in the order of minite.formats.nvfp4, to the bit.

Launch kernels that use these with ``enable_fp_fusion=False``: a fused multiply-add rounds once where the definition
rounds twice (the ``tl.fma`` below have exact products). Divisions are ``div_rn``; Triton's ``/`` is approximate.

Rounding to a small format uses the adder: in v + M with M = 2^(e + 23 - m), e the exponent of v, the sum's last bit is
worth 2^(e - m), so the addition itself rounds v to m mantissa bits, nearest even, and (v + M) - M is exact.

A block of 16 is held as two halves [rows, blocks, 8], so that one thread owns a whole block: 16 bytes of BF16 each.
"""

from __future__ import annotations

import triton
import triton.language as tl

FLT_MAX = tl.constexpr(3.4028234663852886e38)
OUTER_MAX = tl.constexpr(2688.0)
EXPONENT = tl.constexpr(0x7F800000)
# Sums $1..$4 (even columns), $5..$8 (odd), values $9..$12 and $13..$16 for their signs -> 4 bytes of two codes.
# With n the last bits of a sum and E its exponent (149 for |y| < 2), the code is n + 2 (E - 149): modulo 8 that is
# bits + (bits >> 22) - 2. It is put just below the sign bit, which lop3 takes from the value; shf moves the four over.
_ONE_CODE = """
    shr.u32 t, ${sum}, 22;
    add.u32 t, t, ${sum};
    mad.lo.u32 t, t, 0x10000000, 0xE0000000;
    lop3.b32 t, t, ${value}, 0x80000000, 0xD8;
    shf.l.wrap.b32 $0, t, $0, 4;"""
# shf shifts codes in from the right: the last column first.
PACK_ASM = tl.constexpr(
    "{ .reg .b32 t; mov.b32 $0, 0;"
    + "".join(_ONE_CODE.format(sum=s + i, value=s + i + 8) for i in (3, 2, 1, 0) for s in (5, 1))
    + "}"
)


@triton.jit
def max_nan(a, b):
    """The larger; NaN if either is."""
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def block_amaxes(low, high):
    """max |x| of each block: two halves float32 [rows, blocks, 8] -> [rows, blocks]."""
    return tl.reduce(max_nan(tl.abs(low), tl.abs(high)), 2, max_nan)


@triton.jit
def outer_encode(amax):
    """S_enc of an outer amax."""
    s_enc = tl.minimum(tl.div_rn(tl.full(amax.shape, OUTER_MAX, tl.float32), amax), FLT_MAX)
    return tl.where((amax == 0) | (s_enc == 0), 1.0, s_enc)


@triton.jit
def _power_of_two(v):
    """2^e of a positive normal float32 with exponent e."""
    return (v.to(tl.int32, bitcast=True) & EXPONENT).to(tl.float32, bitcast=True)


@triton.jit
def round_e4m3(v):
    """float32 v >= 0 rounded to E4M3 (3 mantissa bits, exponent from -6), saturating at 448; still float32."""
    v = tl.minimum(v, 448.0)
    magic = _power_of_two(tl.maximum(v, 0.015625)) * 1048576.0  # 2^20
    return (v + magic) - magic


@triton.jit
def block_scales(block_amax, s_enc):
    """(block scale as float32, encode factor) of blocks [rows, blocks] with the S_enc of their rows [rows]."""
    scale = round_e4m3(block_amax * (s_enc * (1 / 6))[:, None])
    s_dec = scale * tl.div_rn(tl.full(s_enc.shape, 1.0, tl.float32), s_enc)[:, None]
    return scale, tl.minimum(tl.div_rn(tl.full(s_dec.shape, 1.0, tl.float32), s_dec), FLT_MAX)


@triton.jit
def _e2m1_sum(y):
    """(|y| + M, 2^e): |y| rounded to E2M1 (1 mantissa bit, exponent e from 0) plus M = 2^(e + 22); NaN counts as 6."""
    magnitude = tl.minimum(tl.abs(y), 6.0)
    power = _power_of_two(tl.maximum(magnitude, 1.0))
    return tl.fma(power, 4194304.0, magnitude), power


@triton.jit
def e2m1_value(y):
    """float32 y rounded to E2M1, sign of zero kept."""
    total, power = _e2m1_sum(y)
    magnitude = tl.fma(power, -4194304.0, total).to(tl.int32, bitcast=True)
    return (magnitude | (y.to(tl.int32, bitcast=True) & -2147483648)).to(tl.float32, bitcast=True)


@triton.jit
def e2m1_bytes(y):
    """float32 y [rows, blocks, 8] -> E2M1 codes, two a byte, low nibble = even column: uint8 [rows, blocks, 4]."""
    total, _ = _e2m1_sum(y)
    shape: tl.constexpr = (y.shape[0], y.shape[1], 4, 2)
    even, odd = tl.split(tl.reshape(total.to(tl.int32, bitcast=True), shape))
    even_y, odd_y = tl.split(tl.reshape(y.to(tl.int32, bitcast=True), shape))
    return tl.inline_asm_elementwise(
        PACK_ASM, "=&r" + ",r" * 16, [even, odd, even_y, odd_y], dtype=tl.uint8, is_pure=True, pack=4
    )


@triton.jit
def e2m1_unpacked(packed):
    """Bytes [rows, blocks, 4] -> float32 E2M1 values [rows, blocks, 8].

    Where a code sits, at the end of the exponent, float32 reads it as 2^-126 times its value.
    """
    codes = tl.reshape(tl.join(packed & 15, packed >> 4), (packed.shape[0], packed.shape[1], 8)).to(tl.int32)
    bits = ((codes & 7) << 22) | ((codes & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126
