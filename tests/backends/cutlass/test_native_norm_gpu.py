"""RMS norm with its quantizer in one native kernel on a GPU, against the definition computed on a CPU. BITWISE.

Runs on sm_90, sm_100 and sm_103, each with its own library.
"""

from __future__ import annotations

import pytest
import torch
from cases import exact_norm, normal
from tolerances import assert_same_bytes
from torch import Tensor

from minite.backends.cutlass import norm
from minite.formats import layout, nvfp4

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("architecture", "poisoned_memory")]


def scaled_rows(rows: int, k: int, seed: int) -> Tensor:
    return normal(rows, k, seed=seed) * torch.exp2(torch.arange(rows) % 13 - 6.0).bfloat16()[:, None]


@pytest.mark.parametrize("k", [16, 80, 1024, 1040, 2048, 2064, 8192])
@pytest.mark.parametrize("summed", [False, True])
def test_norm_then_quantize(summed, k):
    """Every output, asked for and not; then scales in tiles."""
    x, weight = scaled_rows(133, k, 39), normal(k, seed=48)
    addend = scaled_rows(133, k, 49) if summed else None
    t_MK = x if addend is None else x + addend
    y_MK = exact_norm(t_MK, weight, 1e-6)
    expected = nvfp4.quantize(y_MK, (1, 16), "row")
    linear = expected.block_scale.view(torch.uint8)
    operands = x.cuda(), None if addend is None else addend.cuda(), weight.cuda(), 1e-6
    for plain in (True, False):
        total, normed, codes, scales, amax = norm.norm_quantize(*operands, plain, False)
        assert_same_bytes(amax, expected.amax, "amax")
        assert_same_bytes(scales, linear, "scales")
        assert_same_bytes(codes, expected.codes, "codes")
        for got, wanted, value in ((total, summed, t_MK), (normed, plain, y_MK)):
            assert_same_bytes(got.view(torch.int16), (value if wanted else value.new_empty(0)).view(torch.int16))
    tiles = norm.norm_quantize(*operands, False, True)[3].cpu()
    whole = layout.unswizzle(tiles, 133, layout.padded_shape(1, k // 16)[1])
    assert_same_bytes(whole[:, : k // 16].contiguous(), linear)
    assert int(whole[:, k // 16 :].sum()) == 0, "columns that pad are zero"


def test_the_operator_keeps_the_rules_of_torch():
    x_MK = normal(48, 64, seed=60).cuda()
    for addend, plain in ((None, False), (x_MK, True)):
        operands = (x_MK, addend, x_MK[0], 1e-6, plain, plain)
        torch.library.opcheck(norm.norm_quantize, operands, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("k", [48, 2048, 4096])
def test_the_norm_is_that_of_the_backend_triton(fused, k):
    """The learner's norm is triton's, the sampler's this one: their codes have to agree."""
    x, y, weight = scaled_rows(133, k, 61).cuda(), scaled_rows(133, k, 62).cuda(), normal(k, seed=63).cuda()
    total, normed = fused.add_rms_norm(x, y, weight, 1e-6)
    got = norm.norm_quantize(x, y, weight, 1e-6, True, False)
    assert_same_bytes(got[0].view(torch.int16), total.view(torch.int16), "sum")
    assert_same_bytes(got[1].view(torch.int16), normed.view(torch.int16), "norm")
