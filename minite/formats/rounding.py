"""Round-to-nearest-even conversions to the small formats, bit for bit what the hardware instructions give."""

from __future__ import annotations

import torch
from torch import Tensor

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the low 3 bits of a code; bit 3 is the sign
E2M1_MAX = 6.0
E4M3_MAX = 448.0


def e2m1_code(y: Tensor) -> Tensor:
    """E2M1 codes 0..15 of float32 values, as ``cvt.rn.satfinite.e2m1x2.f32`` gives them. uint8, same shape.

    Ties go to the even code, beyond 6 saturates, NaN gives 7, -0 and what rounds to it give 8.

    The code of an E2M1 magnitude m is 2m up to 2, m + 2 up to 4, m/2 + 4 up to 6: concave, so the least of the three.
    Rounding to nearest even is monotone and an even offset keeps it, so each branch may be rounded by itself, where
    scaling by 2 is exact and nothing but the one rounding happens.
    """
    y = y.nan_to_num(nan=E2M1_MAX, posinf=E2M1_MAX, neginf=-E2M1_MAX)
    sign = (y.view(torch.int32) >> 28).bitwise_and_(8)
    magnitude = y.abs_().clamp_(max=E2M1_MAX)
    code = (magnitude * 2).round_()
    torch.minimum(code, magnitude.round().add_(2), out=code)
    torch.minimum(code, magnitude.mul_(0.5).round_().add_(4), out=code)
    return sign.bitwise_or_(code.to(torch.int32)).to(torch.uint8)


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
    back = torch.nextafter(near, torch.copysign(torch.full_like(near, torch.inf), error.to(torch.float32)))
    return torch.where(on_tie & (error != 0), back, near).to(dtype)
