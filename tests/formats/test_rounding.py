"""Rounding to E2M1, E4M3, E8M0 and once to bfloat16, against thresholds and exhaustive search. BITWISE."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import nvfp4_scalar
import pytest
import torch
from cases import DEVICES, seeded
from tolerances import assert_same_bytes

from minite.formats.rounding import E2M1_VALUES, e2m1_code, e4m3, e8m0_ceil, round_once

THRESHOLDS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)


def by_thresholds(y):
    """E2M1 code of float32 y: count the thresholds passed, a tie counting only where that gives the even code."""
    m = y.abs()
    passed = [(m > t) if i % 2 == 0 else (m >= t) for i, t in enumerate(THRESHOLDS)]
    code = torch.stack(passed).sum(0) + 8 * torch.signbit(y)
    return torch.where(y.isnan(), 7, code).to(torch.uint8)


@pytest.mark.parametrize("device", DEVICES)
def test_e2m1_code_of_every_bfloat16(device):
    every = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    assert_same_bytes(e2m1_code(every.to(device)).cpu(), by_thresholds(every), "e2m1")


def test_e2m1_code_beside_every_threshold_and_of_random_float32_bits():
    t = torch.tensor(THRESHOLDS + E2M1_VALUES)
    beside = torch.cat((t, torch.nextafter(t, t + 1), torch.nextafter(t, t - 1)))
    bits = torch.randint(-(2**31), 2**31 - 1, (500_000,), generator=seeded(0)).to(torch.int32).view(torch.float32)
    near = torch.rand(500_000, generator=seeded(1)) * 14 - 7
    y = torch.cat((beside, -beside, bits, near))
    assert_same_bytes(e2m1_code(y), by_thresholds(y), "e2m1")


def test_e2m1_code_leaves_its_input_alone():
    y = torch.tensor([1.3, float("nan"), -9.0])
    before = y.clone()
    e2m1_code(y)
    assert_same_bytes(y, before)


def test_e4m3_ties_neighbours_saturation_and_nan():
    values = np.array(nvfp4_scalar.E4M3_VALUES, np.float32)
    ties = (values[:-1] + values[1:]) / 2  # exact; the first is 2^-10, between 0 and the smallest
    beside = [np.nextafter(ties, np.float32(np.inf)), np.nextafter(ties, np.float32(0))]
    x = np.concatenate([values, ties, *beside, [449.0, 464.0, 465.0, 1e9, np.inf]]).astype(np.float32)
    expected = torch.tensor([nvfp4_scalar.e4m3(v) for v in x], dtype=torch.uint8)
    assert_same_bytes(e4m3(torch.from_numpy(x)).view(torch.uint8), expected, "e4m3")
    assert e4m3(torch.tensor([float("nan")])).view(torch.uint8).item() == 0x7F


def test_e8m0_is_the_least_power_of_two_not_below():
    edges = torch.tensor([0.0, 2.0**-149, 2.0**-127, 2.0**-126, 1.0, 3.0, torch.finfo(torch.float32).max / 448])
    random = torch.randn(2000, generator=seeded(2)).abs() * torch.exp2(torch.randint(-126, 100, (2000,)).float())
    x = torch.cat((edges, torch.nextafter(edges, torch.tensor(torch.inf)), random))
    for value, biased in zip(x.tolist(), e8m0_ceil(x).tolist(), strict=True):
        power = Fraction(2) ** (biased - 127)
        assert power >= Fraction(value)
        assert biased == 0 or power / 2 < Fraction(value), f"{value} got 2^{biased - 127}"


def test_round_once_where_going_through_float32_rounds_twice():
    upper = torch.randn(4000, generator=seeded(3)).bfloat16().double()
    half_ulp = torch.exp2(upper.abs().log2().floor() - 8)  # half the spacing of bfloat16
    tie = upper + half_ulp
    for direction in (-1, 1):
        beside = tie + direction * half_ulp * 2.0**-40  # nearer to the tie than float32 can say
        expected = torch.tensor([_nearest_bfloat16(v) for v in beside.tolist()], dtype=torch.bfloat16)
        assert (beside.to(torch.bfloat16) != expected).any(), "the double rounding that this guards against is gone"
        assert_same_bytes(round_once(beside, torch.bfloat16), expected, f"direction {direction}")


def test_round_once_of_ordinary_and_special_values():
    x = torch.randn(10_000, generator=seeded(4), dtype=torch.float64)
    x = torch.cat((x, torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 1e300], dtype=torch.float64)))
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert_same_bytes(round_once(x, dtype), x.to(dtype), str(dtype))
    assert round_once(torch.tensor([torch.nan], dtype=torch.float64), torch.bfloat16).isnan().all()
    with pytest.raises(NotImplementedError, match="float16"):
        round_once(x, torch.float16)


def _nearest_bfloat16(value: float) -> float:
    near = torch.tensor(value, dtype=torch.bfloat16)
    bits = int(near.view(torch.int16))
    neighbours = [torch.tensor(b, dtype=torch.int16).view(torch.bfloat16).item() for b in (bits - 1, bits, bits + 1)]
    return min(neighbours, key=lambda n: abs(Fraction(n) - Fraction(value)))
