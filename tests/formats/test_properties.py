"""What holds for every NVFP4 tensor, on shapes, magnitudes and patterns that hypothesis draws. Fixed seeds."""

from __future__ import annotations

import pytest
import torch
from cases import seeded
from hypothesis import given, settings
from hypothesis import strategies as st
from tolerances import assert_same_bytes

from minite.config.operands import OPERANDS
from minite.formats import block_scaled, layout, nvfp4, operand_amax, quantize_operand

NVFP4 = [how for how in OPERANDS if how.startswith("nvfp4")]
PLAIN = [how for how in NVFP4 if not how.endswith("4o6")]
some = settings(max_examples=40, deadline=None, derandomize=True, database=None)


@st.composite
def tensors(draw, exponents=(-40, 40)):
    """float32 or BF16 [16 n, 16 g], its elements' exponents spread by none, a little, or beyond what a block holds."""
    rows, blocks = 16 * draw(st.integers(1, 3)), draw(st.integers(1, 6))
    spread, exponent = draw(st.sampled_from([0, 3, 12])), draw(st.integers(*exponents))
    g = seeded(draw(st.integers(0, 2**31)))
    x = torch.randn(rows, 16 * blocks, generator=g).clamp(-4, 4)
    x *= torch.exp2(torch.randint(-spread, spread + 1, x.shape, generator=g).float() + exponent)
    x[torch.rand(x.shape, generator=g) < draw(st.sampled_from([0.0, 0.3, 0.95]))] = 0
    return x.to(draw(st.sampled_from([torch.float32, torch.bfloat16])))


def scales(q):
    """Block scales by element, float32 [rows, K]."""
    return q.block_scale.float().repeat_interleave(16, -1)


def unit(q):
    """What code 1 with block scale 1 stands for: amax / outer_max, by element."""
    amax = q.amax if q.amax.ndim == 0 else q.amax[:, None]
    return (amax / q.outer_max).expand(q.shape)


@pytest.mark.parametrize("how", NVFP4)
@given(tensors())
@some
def test_scales_and_values_are_finite_and_no_scale_is_negative(how, x):
    q = quantize_operand(x, how)
    assert q.block_scale.view(torch.uint8).max() <= 126  # 448; 127 and what has the sign bit would be NaN or below 0
    for values in (q.dequantize(), q.dequantize(torch.bfloat16), block_scaled(q, torch.float32)):
        assert values.isfinite().all()


@pytest.mark.parametrize("how", PLAIN)
@given(tensors())
@some
def test_the_error_is_at_most_half_a_step_of_the_block(how, x):
    """Neighbouring codes are at most 2 apart, between 4 and 6, so rounding costs at most one scale, saturation less:
    a normal E4M3 scale is at most 1/16 below what was asked, 0.375 of itself at code 6. A scale below 2^-6 may be
    2^-10 below: saturation then adds up to 6 of those. 2^-20: some roundings of float32 beside."""
    q = quantize_operand(x, how)
    s = scales(q)
    bound = unit(q) * torch.where(s >= 2.0**-6, s, s + 6 * 2.0**-10) * (1 + 2.0**-20)
    assert ((x.float() - q.dequantize()).abs() <= bound + 2.0**-149).all()


@pytest.mark.parametrize("how", NVFP4)
@given(tensors())
@some
def test_values_of_a_block_keep_their_order(how, x):
    """And their sign: nothing crosses 0."""
    q = quantize_operand(x, how)
    order = x.float().view(*x.shape[:-1], -1, 16).argsort(-1)
    values = q.dequantize().view(*x.shape[:-1], -1, 16).gather(-1, order)
    assert (values.diff(dim=-1) >= 0).all()
    assert (q.dequantize() * x.float() >= 0).all()


@pytest.mark.parametrize("how", NVFP4)
@given(tensors(exponents=(-20, 20)), st.integers(-30, 30))
@some
def test_a_power_of_two_goes_into_the_outer_scale_alone(how, x, exponent):
    plain, scaled = quantize_operand(x, how), quantize_operand(x * 2.0**exponent, how)
    assert_same_bytes(scaled.codes, plain.codes)
    assert_same_bytes(scaled.block_scale.view(torch.uint8), plain.block_scale.view(torch.uint8))
    assert_same_bytes(scaled.amax, plain.amax * 2.0**exponent)


@pytest.mark.parametrize("how", PLAIN)
@given(tensors())
@some
def test_quantizing_the_values_again_changes_nothing(how, x):
    """Where scales are normal: the largest code is 6 then, so it asks for the same scale again. A block without a code
    of 6 has a subnormal scale, and may get another. The amax may be an ulp below the largest value read back."""
    q = quantize_operand(x, how)
    values = q.dequantize()
    again = quantize_operand(values, how, amax=torch.maximum(q.amax, operand_amax(values, how)))
    kept = scales(q) >= 2.0**-6
    assert (again.block_scale.float().repeat_interleave(16, -1)[kept] == scales(q)[kept]).all()
    assert (nvfp4.unpack(again.codes)[kept] == nvfp4.unpack(q.codes)[kept]).all()


@pytest.mark.parametrize("how", NVFP4)
@given(tensors(), st.data())
@some
def test_parts_given_the_largest_amax_have_the_codes_of_the_whole(how, x, data):
    """A fusion group (cut along rows) or a TP shard (along either): what operand_amax and amax= are for."""
    dim = data.draw(st.integers(0, 1))
    cut = 16 * data.draw(st.integers(0, x.shape[dim] // 16 - 1))
    parts = [p for p in x.tensor_split([cut], dim) if p.numel()]
    whole = quantize_operand(x, how)
    amaxes = [operand_amax(p, how) for p in parts]
    if "row" in how and dim == 0:
        assert_same_bytes(torch.cat(amaxes), whole.amax)
    else:
        amaxes = [torch.stack(amaxes).amax(0)] * len(parts)
        assert_same_bytes(amaxes[0], whole.amax)
    made = [quantize_operand(p, how, amax=amax) for p, amax in zip(parts, amaxes, strict=True)]
    assert_same_bytes(torch.cat([q.codes for q in made], dim), whole.codes)
    scale = torch.cat([q.block_scale.view(torch.uint8) for q in made], dim)
    assert_same_bytes(scale, whole.block_scale.view(torch.uint8))


@given(tensors())
@some
def test_a_2d_copy_for_the_other_direction_holds_the_same_values(x):
    q, turned = quantize_operand(x, "nvfp4_2d"), quantize_operand(x.mT.contiguous(), "nvfp4_2d")
    assert_same_bytes(turned.dequantize().mT.contiguous(), q.dequantize())


@given(st.integers(1, 400), st.integers(1, 40), st.sampled_from(["128x4", "8x4"]), st.integers(0, 99))
@some
def test_any_swizzle_goes_back_and_loses_no_scale(rows, columns, tile, seed):
    linear = torch.randint(1, 256, (rows, columns), generator=seeded(seed), dtype=torch.uint8)
    flat = layout.swizzle(linear, tile)
    assert int((flat != 0).sum()) == linear.numel()
    assert_same_bytes(layout.unswizzle(flat, rows, columns, tile), linear)


@given(st.lists(st.integers(0, 150), min_size=1, max_size=6), st.integers(1, 9), st.sampled_from(["128x4", "8x4"]))
@some
def test_any_experts_are_swizzled_and_go_back(rows, columns, tile):
    linear = torch.randint(1, 256, (sum(rows), columns), generator=seeded(sum(rows)), dtype=torch.uint8)
    flat = layout.swizzle_experts(linear, torch.tensor(rows), tile)
    assert_same_bytes(layout.unswizzle_experts(flat, torch.tensor(rows), columns, tile), linear)
