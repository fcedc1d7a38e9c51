"""Four over six against the golden vectors and a scalar reference. BITWISE."""

from __future__ import annotations

import four_over_six_scalar
import golden_te
import pytest
import torch
from cases import DEVICES, EDGE_INPUTS, normal, seeded
from tolerances import assert_same_bytes

from minite.formats import FormatError, nvfp4
from minite.formats.columnwise import quantize_columnwise
from minite.formats.four_over_six import FourOverSix

WAYS = [FourOverSix(err, bound, fast) for err in ("mae", "mse") for bound in (448, 256) for fast in (False, True)]
IDS = [f"{w.err}-{w.bound}-{'fast' if w.fast_error else 'exact'}" for w in WAYS]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", golden_te.INPUTS)
def test_equals_the_golden_bytes(name, device):
    x = golden_te.GOLDEN[f"{name}/input"].to(device)
    modes = [mode for other, mode in golden_te.modes(start="4o6") if other == name]
    assert len(modes) == 24
    for mode in modes:
        golden, options = golden_te.fields(name, mode), golden_te.four_over_six_options(mode)
        options["nonfinite"] = golden_te.nonfinite(name)
        copies = {"": nvfp4.quantize(x, **options)}
        if options["outer"] == "tensor":
            copies["_t"] = quantize_columnwise(x, **options)
        assert {"codes" + suffix for suffix in copies} == {field for field in golden if field.startswith("codes")}
        for suffix, q in copies.items():
            what = f"{mode}{suffix}"
            assert_same_bytes(q.codes.cpu(), golden["codes" + suffix], what)
            scales = golden_te.scale_bytes(golden["scales" + suffix])
            assert_same_bytes(golden_te.scale_bytes(q.block_scale), scales, what)
            amax = golden_te.one_nan(q.amax.cpu().reshape(-1))
            assert_same_bytes(amax, golden_te.one_nan(golden["amax" + suffix]), what)


def assert_equals_scalar(x, block, outer, how):
    q = nvfp4.quantize(x, block, outer, how)
    x32 = x.float()
    amax_rows = x32.abs().amax(-1) if outer == "row" else x32.abs().amax().expand(len(x))
    codes, scales = four_over_six_scalar.quantize(
        x32.numpy(), amax_rows.numpy(), block[0], how.err, how.bound, how.fast_error
    )
    assert_same_bytes(q.block_scale.view(torch.uint8), torch.from_numpy(scales), "scales")
    assert_same_bytes(nvfp4.unpack(q.codes), torch.from_numpy(codes), "codes")


@pytest.mark.parametrize("how", WAYS, ids=IDS)
@pytest.mark.parametrize("name", [name for name in EDGE_INPUTS if name != "subnormals"])
def test_edge_inputs_equal_the_scalar_reference(name, how):
    assert_equals_scalar(EDGE_INPUTS[name](3, 32, torch.bfloat16), (1, 16), "row", how)
    assert_equals_scalar(EDGE_INPUTS[name](16, 16, torch.bfloat16), (16, 16), "tensor", how)


@pytest.mark.parametrize("seed", range(8))
def test_random_shapes_and_magnitudes_equal_the_scalar_reference(seed):
    g = seeded(seed)
    m, blocks, exponent = (int(torch.randint(lo, hi, (), generator=g)) for lo, hi in ((1, 6), (1, 4), (-100, 100)))
    x = torch.randn(m, 16 * blocks, generator=g) * 2.0**exponent
    assert_equals_scalar(x, (1, 16), "row" if seed % 2 else "tensor", WAYS[seed])


def near_ties():
    """Blocks [917, 16] of a few values whose two errors are equal to four units in the last place, and how to compare.

    Of eighths of one number, so that the two errors are often equal but for rounding.
    """
    how = FourOverSix("mse", 256)
    x = torch.randint(-8, 9, (2048, 256), generator=seeded(8)).float() * (1.37 / 8)
    x[:, 0] = 1.37
    amax = x.view(2048, 16, 16).abs().amax(-1)
    errors = []
    for expand in (1.5, 1.0):
        scale = (amax / 6 * (6 * 256 / amax.new_tensor(1.37)) * expand).clamp(max=448).to(torch.float8_e4m3fn).float()
        step = (scale * (1.37 / 1536)).double().unsqueeze(-1)
        y = x.view(2048, 16, 16).double() / step
        values = torch.tensor(four_over_six_scalar.E2M1, dtype=torch.float64)
        nearest = (y.abs().unsqueeze(-1) - values).abs().amin(-1)
        errors.append(((nearest * step) ** 2).sum(-1))
    tied = ((errors[0] - errors[1]).abs() < 1e-6 * errors[1]) & (amax == amax.max())
    return x.view(2048, 16, 16)[tied], how


def test_errors_are_added_in_the_kernels_order():
    """Where two errors tie but for rounding, the order of the sum decides the scale."""
    blocks, how = near_ties()
    assert len(blocks) > 500
    assert_equals_scalar(blocks[:300], (1, 16), "row", how)
    pick = torch.randint(0, len(blocks), (16, 100), generator=seeded(1))
    assert_equals_scalar(blocks[pick].flatten(1), (16, 16), "tensor", how)


def test_a_tie_takes_the_map_to_six():
    """Zeros and a single value of the block: both maps are exact, so both errors are 0."""
    x = torch.zeros(1, 16)
    x[0, 3] = 1
    q = nvfp4.quantize(x, four_over_six=FourOverSix(bound=256))
    assert nvfp4.unpack(q.codes)[0, 3] == 7 and q.block_scale.float().item() == 256


def test_the_bound_decides_how_it_is_read_back():
    x = normal(32, 256)
    errors = []
    for bound in (448, 256):
        q = nvfp4.quantize(x, four_over_six=FourOverSix("mse", bound))
        assert q.outer_max == 6 * bound
        factor = q.block_scale.double() * (q.amax.double() / (6 * bound))
        exact = nvfp4.block_scaled(q, torch.float64) / q.block_scale.double().repeat_interleave(16, -1)
        exact = exact.nan_to_num() * factor.repeat_interleave(16, -1)
        assert torch.allclose(q.dequantize(torch.float64), exact, rtol=2e-7, atol=0)
        errors.append((q.dequantize() - x.float()).norm())
    assert max(errors) < 0.95 * (nvfp4.quantize(x).dequantize() - x.float()).norm()


def test_chunks_experts_and_zero_rows(monkeypatch):
    w_ENK = normal(3, 32, 64) * torch.tensor([1.0, 100.0, 0.0]).bfloat16()[:, None, None]
    for block in ((1, 16), (16, 16)):
        whole = nvfp4.quantize(w_ENK, block, "expert", WAYS[5])
        for e in range(3):
            alone = nvfp4.quantize(w_ENK[e], block, "tensor", WAYS[5])
            assert_same_bytes(whole.codes[e], alone.codes, f"expert {e}")
            assert_same_bytes(whole.block_scale[e], alone.block_scale, f"expert {e}")
        with monkeypatch.context() as patch:
            patch.setattr(nvfp4, "CHUNK", 19 * 64)
            assert nvfp4.quantize(w_ENK, block, "expert", WAYS[5]).bytes_equal(whole)
        assert nvfp4.quantize(w_ENK[:, :0], block, "expert", WAYS[0]).dequantize().shape == (3, 0, 64)


def test_wrong_ways_are_refused():
    for wrong in ({"err": "max"}, {"bound": 300}):
        with pytest.raises(FormatError, match="mae"):
            FourOverSix(**wrong)
