"""FP8 codes and scales against the formula one value at a time. BITWISE."""

from __future__ import annotations

import numpy as np
import nvfp4_scalar
import pytest
import torch
from cases import DEVICES, EDGE_INPUTS, normal
from tolerances import assert_same_bytes

from minite.formats import FormatError, NonFiniteError, fp8, quantize_operand

F = np.float32
AREAS = {"tensor": None, "row": (1, None), "1x128": (1, 128), "128x128": (128, 128)}  # rows, columns of one scale


def scalar(x, area):
    """(code bytes [M, K], float32 scale of every element [M, K]) by the definition."""
    m, k = x.shape
    rows, columns = area or (m, k)
    columns = columns or k
    codes, scales = np.zeros((m, k), np.uint8), np.zeros((m, k), F)
    for r in range(0, m, rows):
        for c in range(0, k, columns):
            tile = (slice(r, r + rows), slice(c, c + columns))
            scale = F(np.abs(x[tile]).max()) / F(448)
            scales[tile] = scale if scale != 0 else F(1)
    with np.errstate(all="ignore"):
        ratio = x / scales
    for i, v in np.ndenumerate(ratio):
        codes[i] = nvfp4_scalar.e4m3(abs(v)) | (0x80 if np.signbit(v) else 0)
    return codes, scales


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("scale", AREAS)
@pytest.mark.parametrize("name", EDGE_INPUTS)
def test_edge_inputs_equal_the_definition(name, scale, device):
    x = EDGE_INPUTS[name](5, 136, torch.bfloat16)  # a whole block and a cut one
    q = fp8.quantize(x.to(device), scale)
    codes, scales = (torch.from_numpy(t) for t in scalar(x.float().numpy(), AREAS[scale]))
    assert_same_bytes(q.codes.cpu(), codes, "codes")
    values = codes.view(torch.float8_e4m3fn)
    assert_same_bytes(q.dequantize().cpu(), values.float() * scales, "values")
    if scale in ("1x128", "128x128"):
        assert q.amax is None and q.block_scale.dtype == torch.float32
        assert_same_bytes(q.block_scale.cpu(), scales[:: AREAS[scale][0], ::128].contiguous(), "block scales")
        assert_same_bytes(fp8.block_scaled(q, torch.float64).cpu(), values.double() * scales.double(), "exact")
    else:
        assert q.block_scale is None and q.outer == scale
        assert_same_bytes(fp8.block_scaled(q).cpu(), values.bfloat16(), "codes alone")


@pytest.mark.parametrize("seed", range(4))
def test_random_magnitudes_equal_the_definition(seed):
    x = normal(3, 260, seed=seed).float() * 10.0 ** (9 * seed - 15)
    for scale, area in AREAS.items():
        codes, _ = scalar(x.numpy(), area)
        assert_same_bytes(fp8.quantize(x, scale).codes, torch.from_numpy(codes), scale)


def test_experts_have_a_scale_each():
    w_ENK = normal(3, 130, 140) * torch.tensor([1.0, 50.0, 0.0]).bfloat16()[:, None, None]
    for scale, alone_scale in (("expert", "tensor"), ("128x128", "128x128")):
        q = fp8.quantize(w_ENK, scale)
        for e in range(3):
            alone = fp8.quantize(w_ENK[e], alone_scale)
            assert_same_bytes(q.codes[e], alone.codes, f"expert {e}")
            assert_same_bytes(q.dequantize()[e], alone.dequantize(), f"expert {e}")


@pytest.mark.parametrize("dim", [0, 1])
def test_a_shard_with_the_amax_of_the_whole_has_its_codes(dim):
    w = normal(64, 64, seed=3)
    w[5, 40] = 30
    whole = fp8.quantize(w, "tensor")
    shards = [fp8.quantize(part, "tensor", amax=whole.amax) for part in w.chunk(2, dim)]
    assert_same_bytes(torch.cat([s.codes for s in shards], dim), whole.codes)


def test_zero_rows():
    for scale in AREAS:
        q = fp8.quantize(normal(0, 256), scale)
        assert q.codes.shape == (0, 256) and q.dequantize().shape == (0, 256)


def test_what_does_not_fit_is_refused():
    x = normal(4, 128)
    with pytest.raises(FormatError, match="float64"):
        fp8.quantize(x.double(), "row")
    with pytest.raises(FormatError, match="'column'.*128x128"):
        fp8.quantize(x, "column")
    with pytest.raises(FormatError, match="expert"):
        fp8.quantize(x, "expert")
    with pytest.raises(FormatError, match="below the largest"):
        fp8.quantize(x, "tensor", amax=torch.tensor(0.5))
    with pytest.raises(FormatError, match="no outer scale"):
        quantize_operand(x, "fp8_1x128", amax=torch.tensor(9.0))
    x[1, 7] = torch.inf
    for scale in AREAS:
        with pytest.raises(NonFiniteError, match=r"act: inf at \[1, 7\]"):
            fp8.quantize(x, scale, name="act")
