"""Dispatch by operand name, QTensor, and how much each format loses. QUANT and BITWISE."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import EDGE_INPUTS, normal
from tolerances import QUANT_ERROR, assert_same_bytes

from minite.config.operands import OPERANDS
from minite.errors import UserError
from minite.formats import FormatError, QTensor, block_scaled, nvfp4, operand_amax, quantize_operand

QUANTIZED = [name for name, operand in OPERANDS.items() if operand.module]


@pytest.mark.parametrize("how", QUANTIZED)
def test_relative_error_lies_in_its_band(how):
    x = normal(256, 512, seed=100)
    error = (quantize_operand(x, how).dequantize() - x.float()).norm() / x.float().norm()
    low, high = QUANT_ERROR[how]
    assert low < error < high


@pytest.mark.parametrize("how", QUANTIZED)
def test_storage_is_what_the_operand_table_says(how):
    x = normal(128, 512)
    q = quantize_operand(x, how)
    outer_bytes = 0 if q.amax is None else q.amax.nbytes
    assert 8 * (q.nbytes - outer_bytes) / x.numel() == OPERANDS[how].bits


@pytest.mark.parametrize("how", QUANTIZED)
def test_operand_amax_is_the_one_that_quantize_uses(how):
    shape = (3, 32, 64) if "weight" in OPERANDS[how].roles else (32, 64)
    x = normal(*shape)
    q, amax = quantize_operand(x, how), operand_amax(x, how)
    if q.amax is None:
        assert amax is None
    else:
        assert_same_bytes(amax, q.amax)
        assert quantize_operand(x, how, amax=amax).bytes_equal(q)
        assert (quantize_operand(x, how, amax=1.5 * amax).codes != q.codes).any()


@pytest.mark.parametrize("how", [how for how in QUANTIZED if how.startswith("nvfp4")])
def test_operand_amax_of_edge_inputs_has_the_same_bytes(how):
    for x in (*(edge(32, 48, torch.bfloat16) for edge in EDGE_INPUTS.values()), normal(0, 16), normal(3, 0, 16)):
        if x.ndim == 2 or "weight" in OPERANDS[how].roles:
            assert_same_bytes(operand_amax(x, how), quantize_operand(x, how).amax)
            assert_same_bytes(operand_amax(x.mT.contiguous().mT, how), quantize_operand(x, how).amax)


def test_bf16_is_left_alone_and_an_unknown_operand_is_an_error():
    x = normal(2, 3)
    assert quantize_operand(x, "bf16") is x and operand_amax(x, "bf16") is None
    with pytest.raises(UserError, match="nvfp4_1d"):
        quantize_operand(x, "nvfp4")
    assert issubclass(FormatError, ValueError)


def test_outer_scale_follows_the_operand_and_the_rank():
    x, w = normal(16, 32), normal(2, 16, 32)
    outers = {how: quantize_operand(x, how).outer for how in QUANTIZED}
    assert outers == {
        "nvfp4_1d": "tensor", "nvfp4_2d": "tensor", "nvfp4_row": "row", "nvfp4_tensor": "tensor",
        "nvfp4_1d_4o6": "tensor", "nvfp4_row_4o6": "row",
        "mxfp8": "none", "fp8_tensor": "tensor", "fp8_row": "row", "fp8_128x128": "none", "fp8_1x128": "none",
    }  # fmt: skip
    for how in ("nvfp4_1d", "nvfp4_1d_4o6", "nvfp4_2d", "fp8_tensor"):
        assert quantize_operand(w, how).outer == "expert"


def test_first_difference_names_field_and_coordinate():
    q = nvfp4.quantize(normal(4, 32), outer="row")
    assert q.bytes_equal(q.to("cpu")) and q.first_difference(replace(q)) is None
    codes = q.codes.clone()
    codes[2, 5] ^= 1
    assert replace(q, codes=codes).first_difference(q).startswith("codes [2, 5]")
    amax = q.amax.clone()
    amax[3] = torch.nextafter(amax[3], torch.tensor(9.0))
    assert q.first_difference(replace(q, amax=amax)).startswith("amax [3]")
    assert q.first_difference(replace(q, layout="swizzled")).startswith("layout")
    assert q.first_difference(replace(q, outer_max=1536.0)).startswith("outer_max")
    assert not q.bytes_equal(replace(q, amax=None))
    assert not q.bytes_equal(nvfp4.quantize(normal(4, 32)))


def test_block_scaled_reads_any_format():
    for how in QUANTIZED:
        q = quantize_operand(normal(16, 64), how)
        assert isinstance(q, QTensor) and block_scaled(q).dtype == torch.bfloat16
        assert block_scaled(q).shape == (16, 64)
