"""NVFP4 keys and values against the scalar reference. BITWISE."""

from __future__ import annotations

import numpy as np
import nvfp4_scalar
import pytest
import torch
from cases import DEVICES, EDGE_INPUTS, normal
from tolerances import assert_same_bytes

from minite.formats import FormatError, nvfp4
from minite.formats.nvfp4_kv import dequantize_kv, quantize_kv


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("outer_scale", [1.0, 0.25, 3.0])
@pytest.mark.parametrize("name", [name for name in EDGE_INPUTS if name != "huge"])
def test_equals_nvfp4_with_a_constant_outer_scale(name, outer_scale, device):
    x = EDGE_INPUTS[name](6, 64, torch.bfloat16).clamp(-2000, 2000)
    codes, scale = quantize_kv(x.view(3, 2, 64).to(device), outer_scale)
    s_enc = np.float32(1) / np.float32(outer_scale)
    wanted_scale = np.zeros((6, 4), np.uint8)
    wanted = np.zeros((6, 64), np.uint8)
    with np.errstate(all="ignore"):
        for row in range(6):
            for b in range(4):
                part = x.float().numpy()[row, 16 * b : 16 * b + 16]
                byte = nvfp4_scalar.e4m3(np.abs(part).max() * (s_enc * (np.float32(1) / np.float32(6))))
                decode = np.float32(nvfp4_scalar.E4M3_VALUES[byte]) * (np.float32(1) / s_enc)
                encode = min(np.float32(1) / decode, nvfp4_scalar.FLT_MAX)
                wanted_scale[row, b] = byte
                wanted[row, 16 * b : 16 * b + 16] = [nvfp4_scalar.e2m1(v * encode) for v in part]
    assert_same_bytes(scale.cpu().view(torch.uint8).view(6, 4), torch.from_numpy(wanted_scale), "scales")
    assert_same_bytes(nvfp4.unpack(codes.cpu()).view(6, 64), torch.from_numpy(wanted), "codes")


def test_a_token_does_not_know_of_the_others_and_reads_back_in_bf16_exactly():
    x = normal(7, 4, 32, seed=1)
    codes, scale = quantize_kv(x)
    for t in range(7):
        alone = quantize_kv(x[t : t + 1])
        assert_same_bytes(codes[t : t + 1], alone[0])
        assert_same_bytes(scale[t : t + 1], alone[1])
    exact = dequantize_kv(codes, scale, torch.float32)
    assert_same_bytes(dequantize_kv(codes, scale, torch.bfloat16).float(), exact)
    assert 0.08 < (exact - x.float()).norm() / x.float().norm() < 0.11  # as nvfp4 in tolerances.QUANT_ERROR


def test_what_lies_beyond_saturates_and_nan_stays():
    x = torch.full((1, 1, 16), 1e6)
    assert (dequantize_kv(*quantize_kv(x), torch.float32) == 2688).all()
    assert (dequantize_kv(*quantize_kv(x, 4.0), torch.float32, 4.0) == 4 * 2688).all()
    x[0, 0, 3] = torch.nan
    assert dequantize_kv(*quantize_kv(x), torch.float32).isnan().all()
    assert dequantize_kv(*quantize_kv(normal(0, 2, 16)), torch.bfloat16).shape == (0, 2, 16)


def test_what_does_not_fit_is_refused():
    for x, outer_scale in ((normal(1, 1, 24), 1.0), (normal(1, 1, 16), 0.0), (torch.ones(1, 1, 16).int(), 1.0)):
        with pytest.raises(FormatError, match="nvfp4_kv"):
            quantize_kv(x, outer_scale)
