"""Round-to-nearest-even conversions to the small formats, bit for bit what the hardware instructions give."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low 3 bits of a code; bit 3 is the sign
E2M1_MAX = 6.0
E4M3_MAX = 448.0

_EXPONENT_BITS = 0x7F800000
_ONE_BITS = 0x3F800000
_FOUR_BITS = 0x40800000


def e2m1_code(y: Tensor) -> Tensor:
    """E2M1 codes 0..15 of float32 values, as ``cvt.rn.satfinite.e2m1x2.f32`` gives them. uint8, same shape.

    Ties go to the even code, beyond 6 saturates, NaN gives 7, -0 and what rounds to it give 8.

    E2M1 steps by p/2 in [p, 2p), with p = 1 also below 1. Adding 2^22 p, whose float32 spacing is p/2, makes the
    adder itself do the one rounding; the low bits of the sum then count the steps.
    """
    y = y.nan_to_num(nan=E2M1_MAX, posinf=E2M1_MAX, neginf=-E2M1_MAX)
    magnitude = y.abs().clamp_(max=E2M1_MAX)
    octave = (magnitude.view(torch.int32) & _EXPONENT_BITS).clamp_(_ONE_BITS, _FOUR_BITS)  # bits of p in {1, 2, 4}
    shifter = octave.add_(22 << 23).view(torch.float32)
    sum_bits = magnitude.add_(shifter).view(torch.int32)
    # count of steps (0..4), plus 2 for each octave: twice the exponent field of the sum, which is 149 for p = 1
    code = (sum_bits & 7).add_(sum_bits >> 22).sub_(2 * 149)
    sign = (y.view(torch.int32) >> 28).bitwise_and_(8)
    return code.bitwise_or_(sign).to(torch.uint8)


def e4m3(x: Tensor) -> Tensor:
    """float8_e4m3fn of float32 values, nearest even, saturating at 448 (``cvt.rn.satfinite.e4m3x2.f32``); NaN stays."""
    # torch saturates by itself only since 2.13; older versions give NaN above 464
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def e8m0_ceil(x: Tensor) -> Tensor:
    """Biased exponent of the smallest power of two >= x, for finite float32 x >= 0. uint8; 0 stands for 2^-127.

    As ``cvt.rp.satfinite.ue8m0x2.f32``.
    """
    bits = x.view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    at_most_smallest = (exponent == 0) & (mantissa <= 0x400000)  # x <= 2^-127, a float32 subnormal
    return (exponent + ((mantissa > 0) & ~at_most_smallest)).to(torch.uint8)


def round_once(x: Tensor, dtype: torch.dtype) -> Tensor:
    """float64 -> bfloat16 | float32 | float64 with a single rounding to nearest even.

    torch converts float64 to bfloat16 through float32 and so rounds twice: a value just beside a bfloat16 tie first
    lands on the tie. There the float32 is moved one step back to the side it came from.
    """
    if dtype == torch.float64 or dtype == torch.float32:
        return x.to(dtype)
    if dtype != torch.bfloat16:
        raise NotImplementedError(f"round_once: dtype {dtype}; supported: bfloat16, float32, float64")
    near = x.to(torch.float32)
    error = x - near.to(torch.float64)
    on_tie = (near.view(torch.int32) & 0xFFFF) == 0x8000
    back = torch.nextafter(near, torch.copysign(torch.full_like(near, torch.inf), error))
    return torch.where(on_tie & (error != 0), back, near).to(dtype)
