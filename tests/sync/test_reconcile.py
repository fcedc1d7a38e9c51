"""sync.reconcile: codes stay, values stay within what is told, and what is told is what a plain loop counts."""

import pytest
import torch

from minite.formats import nvfp4
from minite.formats.qtensor import QTensor
from minite.sync.reconcile import share_outer, untied


def matrix(seed: int, size: float, spread: float = 0.0) -> QTensor:
    """Random values of a size, rows of very different sizes with ``spread``."""
    g = torch.Generator().manual_seed(seed)
    rows_N1 = torch.exp2(-spread * torch.rand(24, 1, generator=g))
    return nvfp4.quantize(torch.randn(24, 64, generator=g) * size * rows_N1)


@pytest.mark.parametrize("ratio", [1.0, 0.9, 0.5, 0.3, 0.01, 1e-4])
@pytest.mark.parametrize("spread", [0.0, 12.0])
def test_costs_are_those_of_a_plain_loop(ratio, spread):
    large, small = matrix(0, 1.2), matrix(1, ratio, spread)
    group, costs = share_outer({"gate": large, "up": small})
    assert group["gate"].bytes_equal(large) and torch.equal(group["up"].codes, small.codes)
    assert torch.equal(group["up"].amax, large.amax)
    cost, errors, vanished = costs[1], [], 0
    before = small.block_scale.double().flatten().tolist()
    after = group["up"].block_scale.double().flatten().tolist()
    factor = float(small.amax) / float(large.amax)
    assert factor <= 1
    for s, t in zip(before, after, strict=True):
        if s > 0:
            errors.append(abs(t - s * factor) / (s * factor))
            vanished += t == 0
    assert cost.ratio == pytest.approx(factor) and cost.underflowed == vanished
    assert cost.max_relative == pytest.approx(max(errors))
    assert cost.mean_relative == pytest.approx(sum(errors) / len(errors))
    if min(t for t in after) >= 2**-6:
        assert cost.max_relative <= 1 / 16  # E4M3 has 4 significant bits where it is normal


def test_a_power_of_two_costs_nothing_where_scales_are_normal():
    large = matrix(0, 1.0)
    small = QTensor("nvfp4", large.codes, large.block_scale, large.amax / 4, large.shape, large.block)
    group, costs = share_outer({"a": large, "b": small})
    assert costs[1].max_relative == 0.0 and costs[1].ratio == 0.25
    assert torch.equal(group["b"].dequantize(torch.float64), small.dequantize(torch.float64))


@pytest.mark.parametrize("outer", [2688.0, 1e-30])
def test_a_member_of_zeros_has_no_say(outer):
    real, zero = matrix(0, 0.01), matrix(1, 1.0)
    zero = QTensor(
        "nvfp4", torch.full_like(zero.codes, 0x80), zero.block_scale, torch.tensor(outer), zero.shape, (1, 16)
    )
    group, costs = share_outer({"zero": zero, "real": real})
    assert group["real"].bytes_equal(real) and torch.equal(group["zero"].amax, real.amax)
    assert group["zero"].dequantize().abs().max() == 0 and [c.max_relative for c in costs] == [0.0, 0.0]


def test_untied():
    a, b = matrix(0, 1.0), matrix(1, 0.5)
    assert untied({"a": a, "b": b}) and not untied({"a": a, "b": a})
