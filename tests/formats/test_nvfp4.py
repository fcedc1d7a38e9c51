"""NVFP4 codes, scales, amax and read-back against golden vectors and a scalar reference. BITWISE."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import nvfp4_scalar
import pytest
import torch
from cases import DEVICES, EDGE_INPUTS, normal, seeded
from safetensors.torch import load_file
from tolerances import assert_same_bytes

from minite.formats import FormatError, NonFiniteError, nvfp4
from minite.formats.four_over_six import FourOverSix

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "nvfp4_te.safetensors")
GOLDEN_INPUTS = sorted({key.split("/")[0] for key in GOLDEN})
MODES = {"1d": ((1, 16), "tensor"), "2d": ((16, 16), "tensor"), "row_scaled": ((1, 16), "row")}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", GOLDEN_INPUTS)
def test_equals_the_golden_bytes(name, mode, device):
    block, outer = MODES[mode]
    x = GOLDEN[f"{name}/input"].to(device)
    q = nvfp4.quantize(x, block, outer, nonfinite="te" if name in ("nan", "inf") else "error")
    golden = {field: GOLDEN[f"{name}/{mode}/{field}"] for field in ("codes", "scales", "amax", "dequant_fp32")}
    assert_same_bytes(q.codes.cpu(), golden["codes"], "codes")
    assert_same_bytes(q.block_scale.cpu().view(torch.uint8), golden["scales"], "scales")
    assert_same_bytes(q.amax.cpu().reshape(-1), golden["amax"], "amax")
    assert_same_bytes(one_nan(q.dequantize().cpu()), one_nan(golden["dequant_fp32"]), "dequant")


def one_nan(x):
    """x with every NaN of the same bytes."""
    return torch.where(x.isnan(), torch.nan, x)


def assert_equals_scalar(x, block=(1, 16), outer="tensor"):
    q = nvfp4.quantize(x, block, outer)
    x32 = x.float()
    amax_rows = x32.abs().amax(-1) if outer == "row" else x32.abs().amax().expand(len(x))
    codes, scales = nvfp4_scalar.quantize(x32.numpy(), amax_rows.numpy(), block[0])
    assert_same_bytes(q.block_scale.view(torch.uint8), torch.from_numpy(scales), "scales")
    assert_same_bytes(nvfp4.unpack(q.codes), torch.from_numpy(codes), "codes")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("outer", ["tensor", "row"])
@pytest.mark.parametrize("name", EDGE_INPUTS)
def test_edge_inputs_equal_the_scalar_reference(name, outer, dtype):
    assert_equals_scalar(EDGE_INPUTS[name](5, 48, dtype), outer=outer)


@pytest.mark.parametrize("name", EDGE_INPUTS)
def test_edge_inputs_in_2d_equal_the_scalar_reference(name):
    assert_equals_scalar(EDGE_INPUTS[name](32, 32, torch.bfloat16), block=(16, 16))


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_and_magnitudes_equal_the_scalar_reference(seed):
    g = seeded(seed)
    m, blocks, exponent = (int(torch.randint(lo, hi, (), generator=g)) for lo, hi in ((1, 20), (1, 6), (-130, 120)))
    x = torch.randn(m, 16 * blocks, generator=g) * 2.0**exponent
    assert_equals_scalar(x.to(DTYPES[0] if seed % 2 else DTYPES[2]), outer="row" if seed % 3 else "tensor")


def test_long_rows_equal_the_scalar_reference():
    assert_equals_scalar(normal(2, 4096))


def test_block_scales_follow_the_kernels_order_of_multiplication():
    """amax_b / 6 * S_enc, the order of the paper, gives another scale about once in a thousand blocks."""
    x = normal(1024, 512, seed=7).float()
    s_enc = np.float32(2688) / x.abs().amax(-1, keepdim=True).numpy()
    block_amax = x.view(1024, 32, 16).abs().amax(-1).numpy()
    kernels_order = block_amax * (s_enc * (np.float32(1) / np.float32(6)))
    papers_order = block_amax / np.float32(6) * s_enc
    expected, other = (nearest_e4m3(order) for order in (kernels_order, papers_order))
    assert (expected != other).any(), "this input cannot tell the orders apart"
    assert_same_bytes(nvfp4.quantize(x, outer="row").block_scale.view(torch.uint8), torch.from_numpy(expected))


def nearest_e4m3(x):
    """E4M3 bytes of float32 x > 0, nearest, ties to even, saturating."""
    values = np.array(nvfp4_scalar.E4M3_VALUES)
    x = np.minimum(x, 448)
    above = np.searchsorted(values, x)
    up, down = values[above] - x, x - values[above - 1]
    return np.where((up < down) | ((up == down) & (above % 2 == 0)), above, above - 1).astype(np.uint8)


def test_rows_do_not_know_of_each_other_with_row_outer():
    x = EDGE_INPUTS["wide_rows"](9, 64, torch.bfloat16)
    together = nvfp4.quantize(x, outer="row")
    for row in range(9):
        alone = nvfp4.quantize(x[row : row + 1], outer="row")
        assert_same_bytes(together.codes[row : row + 1], alone.codes, f"row {row}")
        assert_same_bytes(together.block_scale[row : row + 1], alone.block_scale, f"row {row}")


@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_experts_have_an_outer_scale_each(block):
    w_ENK = normal(3, 32, 64) * torch.tensor([1.0, 100.0, 0.0]).bfloat16()[:, None, None]
    together = nvfp4.quantize(w_ENK, block, "expert")
    assert together.outer == "expert" and together.amax.shape == (3,)
    for e in range(3):
        alone = nvfp4.quantize(w_ENK[e], block)
        assert_same_bytes(together.codes[e], alone.codes, f"expert {e}")
        assert_same_bytes(together.block_scale[e], alone.block_scale, f"expert {e}")
        assert_same_bytes(together.dequantize()[e], alone.dequantize(), f"expert {e}")


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("block", [(1, 16), (16, 16)])
def test_a_shard_with_the_amax_of_the_whole_has_the_codes_of_the_whole(block, dim):
    w = normal(64, 64, seed=3)
    w[5, 40] = 30
    whole = nvfp4.quantize(w, block)
    shards = [nvfp4.quantize(part, block, amax=whole.amax) for part in w.chunk(2, dim)]
    assert_same_bytes(torch.cat([s.codes for s in shards], dim), whole.codes)
    assert_same_bytes(torch.cat([s.block_scale for s in shards], dim), whole.block_scale)


def test_given_amax_that_is_wrong_is_refused():
    x = normal(4, 32)
    with pytest.raises(FormatError, match="below the largest value"):
        nvfp4.quantize(x, amax=torch.tensor(0.5))
    with pytest.raises(FormatError, match=r"expected float32 \[4\]"):
        nvfp4.quantize(x, outer="row", amax=torch.ones(3))
    with pytest.raises(FormatError, match="bfloat16"):
        nvfp4.quantize(x, amax=torch.tensor(9.0).bfloat16())


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("outer", ["tensor", "row"])
def test_a_non_finite_value_is_named_with_its_place(bad, outer):
    x = normal(6, 48)
    x[4, 17] = bad
    with pytest.raises(NonFiniteError, match=r"mlp\.down_proj: .*\[4, 17\]"):
        nvfp4.quantize(x, outer=outer, name="mlp.down_proj")


@pytest.mark.parametrize(
    ("kwargs", "error", "message"),
    [
        ({"four_over_six": "mae"}, FormatError, "four_over_six is 'mae'"),
        (
            {"four_over_six": FourOverSix(), "rounding": "stochastic", "generator": torch.Generator()},
            FormatError,
            "rne",
        ),
        ({"rounding": "stochastic"}, FormatError, "without a generator"),
        ({"rounding": "floor"}, FormatError, "'floor'"),
        ({"block": (1, 32)}, FormatError, "block"),
        ({"outer": "column"}, FormatError, "outer 'column'"),
        ({"outer": "expert"}, FormatError, "3-D"),
        ({"block": (16, 16)}, FormatError, r"\[7, 32\].*rows % 16"),
        ({"nonfinite": "ignore"}, FormatError, "nonfinite"),
    ],
)
def test_what_does_not_fit_is_refused(kwargs, error, message):
    with pytest.raises(error, match=message):
        nvfp4.quantize(normal(7, 32), **kwargs)


def test_shapes_and_dtypes_that_do_not_fit_are_refused():
    for x in (normal(4, 24), normal(16), normal(4, 0), normal(4, 16).double()):
        with pytest.raises(FormatError, match="w: .*expected"):
            nvfp4.quantize(x, name="w")


@pytest.mark.parametrize("outer", ["tensor", "row"])
def test_zero_rows(outer):
    q = nvfp4.quantize(normal(0, 32), outer=outer)
    assert q.codes.shape == (0, 16) and q.block_scale.shape == (0, 2)
    assert q.dequantize().shape == (0, 32) and nvfp4.block_scaled(q).shape == (0, 32)


def test_leading_dimensions_strides_gradients_and_chunks_change_nothing(monkeypatch):
    x = normal(6, 64, seed=5)
    expected = nvfp4.quantize(x, outer="row")
    in_3d = nvfp4.quantize(x.view(2, 3, 64), outer="row")
    assert in_3d.outer == "row"
    assert_same_bytes(in_3d.codes.view(6, 32), expected.codes)
    assert_same_bytes(in_3d.dequantize().view(6, 64), expected.dequantize())
    assert nvfp4.quantize(x.t().contiguous().t(), outer="row").bytes_equal(expected)
    assert nvfp4.quantize(x.float().requires_grad_(), outer="row").bytes_equal(expected)
    monkeypatch.setattr(nvfp4, "CHUNK", 2 * 64 + 1)
    assert nvfp4.quantize(x, outer="row").bytes_equal(expected)


@pytest.mark.parametrize("name", EDGE_INPUTS)
def test_block_scaled_is_exact(name):
    q = nvfp4.quantize(EDGE_INPUTS[name](16, 64, torch.bfloat16), outer="row")
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])[nvfp4.unpack(q.codes).numpy()]
    exact = torch.from_numpy(values * q.block_scale.double().repeat_interleave(16, -1).numpy())
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        assert_same_bytes(nvfp4.block_scaled(q, dtype).double(), exact, str(dtype))


def test_pack_puts_the_even_column_low():
    codes = torch.randint(0, 16, (3, 32), generator=seeded(6), dtype=torch.uint8)
    packed = nvfp4.pack(codes)
    assert_same_bytes(packed, codes[:, 0::2] + 16 * codes[:, 1::2])
    assert_same_bytes(nvfp4.unpack(packed), codes)
