"""Stochastic rounding to E2M1 with numbers that depend on nothing but (seed, element index).

No generator state is stepped per element, so any device, chunking or order of work gives the same codes. Element i of
a tensor (flat, row-major) rounds with 24 bits of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014), in 64-bit integers modulo 2^64:

    mix(z): z ^= z >> 30; z *= 0xBF58476D1CE4E5B9; z ^= z >> 27; z *= 0x94D049BB133111EB; z ^= z >> 31
    u_i   = mix(mix(seed) + (i + 1) * 0x9E3779B97F4A7C15) >> 40,  over 2^24

The seed is mixed first, because raw neighbouring seeds would read shifted pieces of one sequence.

A value between two neighbouring E2M1 magnitudes goes to the upper one where u_i is below its relative distance from
the lower one: the mean of the result is the value, to 2^-22 of the distance of the neighbours. Codes themselves stay
as they are, signs too; beyond 6 it saturates, as the instruction does (``cvt.rs.satfinite.e2m1x4``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite.formats.rounding import E2M1_MAX

_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
BITS = 24  # as many as a float32 in [0, 1) can hold exactly


def draw_seed(generator: torch.Generator) -> int:
    """A seed in [0, 2^63) from the generator, which moves on by one draw: the next call gets another."""
    return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))


def random_bits(seed: int, first: int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """u_i of the elements first .. first + count - 1: int64 in [0, 2^24)."""
    key = _mix(torch.full((), _signed(seed), dtype=torch.int64, device=device))
    index = torch.arange(first + 1, first + 1 + count, dtype=torch.int64, device=device)
    return _shift(_mix(index.mul_(_signed(_GAMMA)).add_(key)), 64 - BITS)


def e2m1_code(y: Tensor, bits: Tensor) -> Tensor:
    """E2M1 codes of float32 y, rounded up in magnitude where bits / 2^24 is below the fraction. uint8; NaN gives 7.

    min(2m, m + 2, m/2 + 4) is the code of magnitude m as a real number: linear between neighbours, integer on codes.
    """
    y = y.nan_to_num(nan=E2M1_MAX, posinf=E2M1_MAX, neginf=-E2M1_MAX)
    sign = (y.view(torch.int32) >> 28).bitwise_and_(8)
    magnitude = y.abs_().clamp_(max=E2M1_MAX)
    position = torch.minimum(torch.minimum(magnitude * 2, magnitude + 2), magnitude * 0.5 + 4)
    lower = position.floor()
    up = bits.to(torch.float32).mul_(2.0**-BITS) < position - lower
    return sign.bitwise_or_(lower.to(torch.int32) + up).to(torch.uint8)


def _mix(z: Tensor) -> Tensor:
    for shift, multiplier in zip((30, 27), _MULTIPLIERS, strict=True):
        z = (z ^ _shift(z, shift)) * _signed(multiplier)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, by: int) -> Tensor:
    """z >> by of the unsigned 64-bit integer that int64 z stands for; torch's own shift copies the sign."""
    return (z >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return (value & (2**64 - 1)) - ((value & 2**63) << 1)
