"""The native gradient of experts' weights on a GPU: products over runs of columns, and a whole backward. SUM-ORDER.

Runs on sm_90 (the twin multiplies BF16 codes x block scales), sm_100 and sm_103, each with its own library.
"""

from __future__ import annotations

import pytest
import torch
from cases import normal
from tolerances import assert_same_bytes, gemm_bound
from torch import Tensor

from minite.backends.cutlass import wgrad
from minite.formats import QTensor, block_scaled, layout, nvfp4
from minite.formats.nvfp4 import OUTER_MAX

pytestmark = pytest.mark.gpu
RUNS = ([64], [64, 192, 64, 128], [64] * 5, [1024, 64, 64, 576])


def gradient(architecture: int, a: QTensor, b: QTensor, columns_E: list[int], dtype: torch.dtype) -> Tensor:
    a, b = a.to("cuda"), b.to("cuda")
    starts = wgrad.run_starts(torch.tensor(columns_E, device="cuda"))
    weight_amax = b.amax.expand(len(columns_E)).contiguous()
    if architecture < 100:
        operands = block_scaled(a), None, a.amax, block_scaled(b), None, weight_amax
    else:
        a_tiles, b_tiles = (wgrad.swizzle_columns(q.block_scale.view(torch.uint8), starts) for q in (a, b))
        operands = a.codes, a_tiles, a.amax, b.codes, b_tiles, weight_amax
    return wgrad.wgrad(*operands, starts, 1 / OUTER_MAX**2, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("mn", [(16, 8), (136, 96), (512, 776)], ids=str)
@pytest.mark.parametrize("columns_E", RUNS, ids=str)
def test_every_run_of_columns_is_its_own_product(architecture, columns_E, mn, dtype):
    (m, n), total = mn, sum(columns_E) + 64  # 64 columns behind the last run are nobody's, and not small
    a = nvfp4.quantize(
        normal(m, total, seed=70) * torch.exp2(torch.arange(m) % 9 - 4.0).bfloat16()[:, None], outer="row"
    )
    b = nvfp4.quantize(normal(n, total, seed=71))
    out = gradient(architecture, a, b, columns_E, dtype).double().cpu()
    a_MR, b_NR = (block_scaled(q, torch.float64) * q.amax.double().view(-1, 1) / OUTER_MAX for q in (a, b))
    assert out.shape == (len(columns_E), m, n) and out.isfinite().all()
    for e, (x, w) in enumerate(zip(a_MR[:, :-64].split(columns_E, 1), b_NR[:, :-64].split(columns_E, 1), strict=True)):
        exact, magnitude = x @ w.T, x.abs() @ w.abs().T
        excess = (out[e] - exact).abs() - gemm_bound(magnitude, exact, columns_E[e], dtype)
        assert float(excess.max()) <= 0, f"expert {e}: {float(excess.max())} above the bound"


def test_zero_columns_give_a_zero_gradient(architecture):
    """An expert without tokens has a run of zeros."""
    a, b = (nvfp4.quantize(torch.cat([normal(16, 64, seed=s), torch.zeros(16, 64).bfloat16()], 1)) for s in (72, 73))
    a = QTensor("nvfp4", a.codes, a.block_scale, a.amax.expand(16).contiguous(), a.shape, a.block)
    out = gradient(architecture, a, b, [64, 64], torch.bfloat16)
    assert int((out[1] != 0).sum()) == 0 and bool((out[0] != 0).any())


@pytest.mark.parametrize("columns_E", RUNS, ids=str)
@pytest.mark.parametrize("n", [16, 136, 512])
def test_scales_of_runs_go_to_tiles_of_their_own(architecture, n, columns_E):
    total = sum(columns_E) + 64
    scales_NG = nvfp4.quantize(normal(n, total, seed=74)).block_scale.view(torch.uint8)
    starts = wgrad.run_starts(torch.tensor(columns_E))
    tiles, height = wgrad.swizzle_columns(scales_NG.cuda(), starts.cuda()).cpu(), layout.padded_shape(n, 4)[0]
    for e, columns in enumerate(columns_E):
        begin, end = (int(starts[i]) * height // 16 for i in (e, e + 1))
        expected = scales_NG[:, starts[e] // 16 : starts[e + 1] // 16].contiguous()
        assert_same_bytes(layout.unswizzle(tiles[begin:end], n, columns // 16), expected)
