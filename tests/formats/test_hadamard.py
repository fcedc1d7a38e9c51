"""The Hadamard transform and columnwise copies against golden vectors and exact sums. BITWISE."""

from __future__ import annotations

import golden_te
import numpy as np
import pytest
import torch
from cases import DEVICES, EDGE_INPUTS, normal
from tolerances import assert_same_bytes

from minite.formats import FormatError, hadamard, nvfp4
from minite.formats.columnwise import quantize_columnwise
from minite.formats.rounding import round_once


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("name", "mode"), golden_te.modes(start="1d_rht"))
def test_equals_the_golden_bytes(name, mode, device):
    golden, x = golden_te.fields(name, mode), golden_te.GOLDEN[f"{name}/input"].to(device)
    how = "plain" if mode.endswith("nosign") else "signs"
    options = {"nonfinite": golden_te.nonfinite(name)}
    for suffix, q in {
        "": nvfp4.quantize(x, **options),
        "_t": quantize_columnwise(x, hadamard=how, **options),
    }.items():
        assert_same_bytes(q.codes.cpu(), golden["codes" + suffix], "codes" + suffix)
        scales = golden_te.scale_bytes(golden["scales" + suffix])
        assert_same_bytes(golden_te.scale_bytes(q.block_scale), scales, "scales" + suffix)
        amax = golden_te.one_nan(q.amax.cpu().reshape(-1))
        assert_same_bytes(amax, golden_te.one_nan(golden["amax" + suffix]), "amax" + suffix)


def exact(x, signs):
    """float64 [.., K] of the definition, by Sylvester's recursion; exact, as exponents here are within 2^40."""
    h = np.ones((1, 1))
    while len(h) < 16:
        h = np.block([[h, h], [h, -h]])
    sign = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.0]) if signs else np.ones(16)
    blocks = x.double().numpy().reshape(*x.shape[:-1], -1, 16)
    return torch.from_numpy((blocks @ (sign[:, None] * h) / 4).reshape(x.shape))


@pytest.mark.parametrize("signs", [True, False])
def test_random_values_equal_the_exact_sum_rounded_once(signs):
    x = normal(64, 96, seed=3)
    x = torch.where(x.abs() < 2**-6, 0, x)  # exponents within 2^9: the float32 sum is then exact
    y = hadamard.transform(x, signs=signs)
    assert_same_bytes(y, round_once(exact(x, signs), torch.bfloat16))


def test_wide_exponents_stay_within_the_error_of_a_float32_sum():
    x = EDGE_INPUTS["wide_blocks"](32, 64, torch.bfloat16)
    y, wanted = hadamard.transform(x).double(), exact(x, signs=True)
    size = x.double().abs().view(32, 4, 16).sum(-1).repeat_interleave(16, -1) / 4
    assert ((y - wanted).abs() <= 2**-8 * wanted.abs() + 16 * 2**-24 * size).all()


def test_it_is_orthogonal_so_both_operands_of_a_gemm_may_be_transformed():
    a, b = (normal(8, 64, seed=seed).double() for seed in (4, 5))
    plain, both = a @ b.T, exact(a, signs=True) @ exact(b, signs=True).T
    assert torch.allclose(plain, both, rtol=0, atol=1e-13)


def test_an_outlier_is_spread_over_its_block():
    x = torch.zeros(1, 16, dtype=torch.bfloat16)
    x[0, 5] = 64
    assert (hadamard.transform(x).abs() == 16).all()


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_a_columnwise_copy_is_the_transposed_tensor(block):
    x = normal(2, 48, 32)
    q = quantize_columnwise(x, block=block, outer="expert")
    assert q.shape == (2, 32, 48) and q.codes.shape == (2, 32, 24) and q.block_scale.shape == (2, 32, 3)
    assert q.bytes_equal(nvfp4.quantize(x.mT.contiguous(), block, "expert"))
    if block == (16, 16):
        assert_same_bytes(q.dequantize().mT.contiguous(), nvfp4.quantize(x, block, "expert").dequantize())


def test_what_does_not_fit_is_refused():
    with pytest.raises(FormatError, match="bfloat16"):
        hadamard.transform(normal(2, 16).float())
    with pytest.raises(FormatError, match="K % 16"):
        hadamard.transform(normal(2, 24))
    with pytest.raises(FormatError, match="'random'"):
        quantize_columnwise(normal(16, 16), hadamard="random")
    with pytest.raises(FormatError, match=r"\[32, 24\]"):
        quantize_columnwise(normal(24, 32))
