"""Stochastic rounding: the bits it uses (BITWISE), and that its mean is the value (STATS: 4 sigma, fixed seeds)."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DEVICES, EDGE_INPUTS, normal, seeded
from tolerances import SIGMAS, assert_same_bytes

from minite.formats import nvfp4, stochastic
from minite.formats.rounding import E2M1_VALUES, e2m1_code

MASK = 2**64 - 1
E2M1 = torch.tensor(E2M1_VALUES + tuple(-v for v in E2M1_VALUES), dtype=torch.float64)


def splitmix(z):
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def bits_of(seed, index):
    """The definition in Python integers."""
    return splitmix((splitmix(seed) + (index + 1) * 0x9E3779B97F4A7C15) & MASK) >> 40


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", [0, 1, 12345, 2**63 - 2])
def test_bits_equal_the_definition_from_any_start(seed, device):
    wanted = [bits_of(seed, i) for i in range(1000, 1200)]
    got = stochastic.random_bits(seed, 1000, 200, device)
    assert got.dtype == torch.int64 and got.tolist() == wanted
    assert stochastic.random_bits(seed, 1100, 5, device).tolist() == wanted[100:105]


def test_the_mixer_is_splitmix64():
    """First outputs of the published generator for seed 0, which mixes multiples of its gamma."""
    assert splitmix(0x9E3779B97F4A7C15) == 0xE220A8397B1DCDAF
    assert splitmix(2 * 0x9E3779B97F4A7C15 & MASK) == 0x6E789E6AA1B965F4


def scalar_code(y, bits):
    m = min(abs(y), 6.0)
    lower = max(i for i, v in enumerate(E2M1_VALUES) if v <= m)
    if lower < 7:
        lower += bits / 2**24 < (m - E2M1_VALUES[lower]) / (E2M1_VALUES[lower + 1] - E2M1_VALUES[lower])
    return lower + (8 if math.copysign(1, y) < 0 else 0)


def test_codes_equal_the_scalar_rule():
    y = torch.rand(20_000, generator=seeded(1)) * 16 - 8
    y = y.bfloat16().float()  # 8 bits: every step of the fast rule is exact
    bits = stochastic.random_bits(7, 0, len(y))
    wanted = [scalar_code(v, b) for v, b in zip(y.tolist(), bits.tolist(), strict=True)]
    assert_same_bytes(stochastic.e2m1_code(y, bits), torch.tensor(wanted, dtype=torch.uint8))


def test_codes_themselves_zeros_nan_and_what_lies_beyond_stay():
    y = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES), torch.nan, 6.01, -1e30, torch.inf])
    for bits in (0, 1, 2**24 - 1):
        assert_same_bytes(stochastic.e2m1_code(y, torch.full((len(y),), bits)), e2m1_code(y), f"bits {bits}")


@pytest.mark.parametrize("value", [0.1, 0.49, 0.74, 1.25, 1.9, 2.5, 2.999, 3.3, 5.0, 5.9, -0.3, -4.7])
def test_the_mean_over_elements_is_the_value(value):
    n = 200_000
    values = E2M1[stochastic.e2m1_code(torch.full((n,), value), stochastic.random_bits(3, 0, n)).long()]
    steps = sorted({abs(v) for v in values.tolist()})
    assert len(steps) == 2
    p = (abs(value) - steps[0]) / (steps[1] - steps[0])
    sigma = (steps[1] - steps[0]) * math.sqrt(p * (1 - p) / n)
    assert abs(values.mean() - value) < SIGMAS * sigma


def test_quantize_is_unbiased_over_seeds_where_nearest_rounding_is_not():
    x = normal(8, 64, seed=2).float()
    seeds = 400
    total, squares = torch.zeros(8, 64, dtype=torch.float64), torch.zeros(8, 64, dtype=torch.float64)
    for seed in range(seeds):
        q = nvfp4.quantize(x, outer="row", rounding="stochastic", generator=seeded(seed))
        values = q.dequantize().double()
        total += values
        squares += values**2
    mean = total / seeds
    step = q.block_scale.double().repeat_interleave(16, -1) * (q.amax.double() / 2688)[:, None]
    inside = x.abs().double() < 6 * step  # beyond the largest code it saturates, and may
    sigma = ((squares / seeds - mean**2).clamp(min=0) / seeds).sqrt()
    z = ((mean - x.double()) / (sigma + 1e-3 * step))[inside]
    assert inside.double().mean() > 0.95
    assert z.abs().max() < 5  # the largest of 500: 500 P(|z| > 5) = 3e-4
    assert abs(z.mean()) < SIGMAS / math.sqrt(z.numel())
    nearest = nvfp4.quantize(x, outer="row").dequantize().double()
    assert ((nearest - x.double()).abs() > 5 * (sigma + 1e-3 * step))[inside].double().mean() > 0.5


def test_neighbouring_elements_and_seeds_are_uncorrelated():
    n = 100_000
    u = torch.stack([stochastic.random_bits(seed, 0, n).double() / 2**24 - 0.5 for seed in (5, 6)])
    var = 1 / 12
    for a, b in ((u[0, :-1], u[0, 1:]), (u[0], u[1]), (u[0, :-16], u[0, 16:]), (u[0, 1:], u[1, :-1])):
        assert abs((a * b).mean()) < SIGMAS * var / math.sqrt(len(a))


@pytest.mark.parametrize("device", DEVICES)
def test_same_seed_same_bytes_whatever_the_device_or_chunk(device, monkeypatch):
    x = normal(3, 16, 64, seed=4)
    options = {"outer": "expert", "rounding": "stochastic"}
    first = nvfp4.quantize(x, generator=seeded(9), **options)
    assert nvfp4.quantize(x.to(device), generator=seeded(9), **options).to("cpu").bytes_equal(first)
    monkeypatch.setattr(nvfp4, "CHUNK", 5 * 64)
    assert nvfp4.quantize(x, generator=seeded(9), **options).bytes_equal(first)
    assert not nvfp4.quantize(x, generator=seeded(10), **options).bytes_equal(first)
    assert_same_bytes(first.block_scale, nvfp4.quantize(x, outer="expert").block_scale, "scales are not random")


def test_one_generator_gives_each_call_another_seed():
    x, generator = normal(8, 64), seeded(0)
    a, b = (nvfp4.quantize(x, rounding="stochastic", generator=generator) for _ in range(2))
    assert not a.bytes_equal(b)


@pytest.mark.parametrize("name", EDGE_INPUTS)
def test_edge_inputs_stay_between_the_neighbours_of_nearest_rounding(name):
    x = EDGE_INPUTS[name](16, 32, torch.bfloat16)
    q = nvfp4.quantize(x, outer="row", rounding="stochastic", generator=seeded(1))
    rne = nvfp4.quantize(x, outer="row")
    difference = (nvfp4.unpack(q.codes) & 7).int() - (nvfp4.unpack(rne.codes) & 7).int()
    assert difference.abs().max() <= 1
    assert_same_bytes(nvfp4.unpack(q.codes) & 8, nvfp4.unpack(rne.codes) & 8, "signs")
