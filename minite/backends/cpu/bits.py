"""Roundings to the small formats on the bits of float32, free of branches and tables, so that eight run at once.

Adding a power of two p rounds a smaller float32 to a multiple of p * 2^-23, to nearest even, in one addition; the
multiple is then the difference of the two bit patterns.
"""

from __future__ import annotations

import numpy as np
from numba import types
from numba.extending import overload

from minite.backends.cpu.compiled import inlined

F32, I32, U32, U8, U64 = np.float32, np.int32, np.uint32, np.uint8, np.uint64

MAGNITUDE = U32(0x7FFFFFFF)  # all bits of a float32 but the sign
FLT_MAX = F32(np.finfo(F32).max)
FLT_MAX_BITS = 0x7F7FFFFF


def even_odd(x_RK, row, j):  # type: ignore[no-untyped-def]
    """Bits of the float32 values in columns 2j and 2j + 1. x: float32 [rows, K], or BF16 as uint32 [rows, K/2]."""
    raise NotImplementedError("only inside kernels")


@overload(even_odd)
def _even_odd(x_RK, row, j):  # type: ignore[no-untyped-def]
    if x_RK.dtype == types.float32:
        return lambda x_RK, row, j: (F32(x_RK[row, 2 * j]).view(U32), F32(x_RK[row, 2 * j + 1]).view(U32))
    # little endian: the even column is the low half, and a BF16 is the upper half of its float32
    return lambda x_RK, row, j: (U32(x_RK[row, j] << U32(16)), U32(x_RK[row, j] & U32(0xFFFF0000)))


@inlined
def e2m1(magnitude):  # type: ignore[no-untyped-def]
    """Code 0..7 of a float32 >= 0 in the low byte, ties to the even code, saturating; the other bits are no code's.

    It is the least of three roundings; formats.rounding.e2m1_code says why. The additions round to multiples of 0.5, 1
    and 2; the 2 and the 8 in their constants are the offsets of the codes. All are counted from the bits of 2^22.
    """
    m = magnitude if magnitude < F32(6) else F32(6)
    halves = F32(m + F32(2.0**22)).view(I32)
    ones = I32(F32(m + F32(2.0**23 + 2)).view(I32) - I32(0x00800000))
    twos = I32(F32(m + F32(2.0**24 + 8)).view(I32) - I32(0x01000000))
    least = halves if halves < ones else ones
    return least if least < twos else twos


@inlined
def e4m3(x):  # type: ignore[no-untyped-def]
    """(byte, its value) of the E4M3 nearest to a float32 >= 0, ties to even, saturating at 448."""
    v = x if x < F32(448) else F32(448)
    bits = F32(v).view(U32)
    rounded = U32(bits + U32(0x7FFFF) + U32((bits >> U32(20)) & U32(1)))  # to 3 bits of mantissa
    sum_ = F32(v + F32(2.0**14))  # to a multiple of 2^-9: E4M3 subnormals
    subnormal = v < F32(2.0**-6)
    byte = U32(sum_.view(U32) - U32(0x46800000)) if subnormal else U32((rounded >> U32(20)) - U32(120 << 3))
    value = F32(sum_ - F32(2.0**14)) if subnormal else U32(rounded & U32(0xFFF00000)).view(F32)
    return U8(byte), value


@inlined
def spread(factor_G, out):  # type: ignore[no-untyped-def]
    """Each factor for the eight pairs of its block: out uint64 [4 G], to be read as float32 [8 G].

    Two at a time, because the compiler does not join single stores.
    """
    for g in range(factor_G.shape[0]):
        bits = U64(F32(factor_G[g]).view(U32))
        both = bits | (bits << U64(32))
        for i in range(4):
            out[4 * g + i] = both


@inlined
def e2m1_value(code):  # type: ignore[no-untyped-def]
    """float32 of the low four bits: from 1 on, two exponent bits and one of mantissa; 0.5 below; and a sign."""
    magnitude = U32(code & U32(7))
    normal = U32(U32(magnitude << U32(22)) + U32(252 << 22))
    small = U32(magnitude * U32(0x3F000000))  # 0 or the bits of 0.5
    bits = normal if magnitude > U32(1) else small
    return U32(bits | U32(U32(code & U32(8)) << U32(28))).view(F32)


@inlined
def bf16(x):  # type: ignore[no-untyped-def]
    """The bits of a float32 rounded to nearest even at BF16, in the low half. Every NaN becomes one."""
    bits = F32(x).view(U32)
    rounded = U32(bits + U32(0x7FFF) + U32((bits >> U32(16)) & U32(1)))
    return U32(U32(0x7FC0) if U32(bits & MAGNITUDE) > U32(0x7F800000) else U32(rounded >> U32(16)))


def put_pair(out_B, j, even, odd):  # type: ignore[no-untyped-def]
    """Stores float32 values as columns 2j and 2j + 1 of a row: as uint64 [K/2], or as BF16 into uint32 [K/2]."""
    raise NotImplementedError("only inside kernels")


@overload(put_pair)
def _put_pair(out_B, j, even, odd):  # type: ignore[no-untyped-def]
    def as_float32(out_B, j, even, odd):  # type: ignore[no-untyped-def]
        out_B[j] = U64(U64(F32(even).view(U32)) | U64(U64(F32(odd).view(U32)) << U64(32)))

    def as_bf16(out_B, j, even, odd):  # type: ignore[no-untyped-def]
        out_B[j] = U32(bf16(even) | U32(bf16(odd) << U32(16)))

    return as_float32 if out_B.dtype == types.uint64 else as_bf16
