"""MXFP8 against its formula, one block at a time. BITWISE."""

from __future__ import annotations

import math

import pytest
import torch
from cases import DEVICES, EDGE_INPUTS, normal
from tolerances import assert_same_bytes

from minite.formats import FormatError, NonFiniteError, mxfp8, quantize_operand


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", [name for name in EDGE_INPUTS if name != "subnormals"])
def test_every_block_has_the_smallest_scale_that_does_not_saturate(name, device):
    x = EDGE_INPUTS[name](5, 96, torch.bfloat16).to(device)
    q = mxfp8.quantize(x)
    exponents = q.block_scale.cpu().view(torch.uint8).int()
    blocks = x.cpu().double().view(5, 3, 32)
    codes = q.codes.cpu().view(5, 3, 32)
    for row in range(5):
        for g in range(3):
            amax = float(blocks[row, g].abs().max())
            # amax * fl(1/448) is a float32 product: at amax = 448 * 2^i it may round onto or past the power of two
            ratio = float(torch.tensor(amax, dtype=torch.float32) * torch.tensor(1 / 448, dtype=torch.float32))
            expected = 0 if ratio == 0 else max(0, math.ceil(math.log2(ratio)) + 127)
            assert exponents[row, g] == expected
            scaled = blocks[row, g] * (2.0 ** (127 - expected) if expected else 1.0)
            nearest = scaled.float().clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8)
            assert_same_bytes(codes[row, g], nearest, f"block {row}, {g}")


def test_subnormal_inputs_round_to_zero_and_read_back_as_zero():
    x = EDGE_INPUTS["subnormals"](5, 96, torch.bfloat16)
    assert (mxfp8.quantize(x).dequantize() == 0).all()


def test_reads_back_what_it_holds_exactly():
    q = mxfp8.quantize(normal(7, 64))
    scale = torch.exp2(q.block_scale.view(torch.uint8).double() - 127).repeat_interleave(32, -1)
    exact = q.codes.view(torch.float8_e4m3fn).double() * scale
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert_same_bytes(mxfp8.block_scaled(q, dtype).double(), exact, str(dtype))
    assert q.outer == "none" and q.amax is None


def test_what_does_not_fit_is_refused():
    x = normal(4, 64)
    x[1, 2] = torch.nan
    with pytest.raises(NonFiniteError, match=r"act: nan at \[1, 2\]"):
        mxfp8.quantize(x, name="act")
    with pytest.raises(FormatError, match="K % 32"):
        mxfp8.quantize(normal(4, 48))
    with pytest.raises(FormatError, match="float64"):
        mxfp8.quantize(normal(4, 64).double())
    with pytest.raises(FormatError, match="no outer scale"):
        quantize_operand(normal(4, 64), "mxfp8", amax=torch.tensor(9.0))
    assert mxfp8.quantize(normal(0, 64)).dequantize().shape == (0, 64)
