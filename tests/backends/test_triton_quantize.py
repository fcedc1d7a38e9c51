"""The Triton quantizers on a GPU against minite.formats on a CPU. BITWISE."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import EDGE_INPUTS, normal, seeded
from safetensors.torch import load_file
from tolerances import assert_same_bytes

from minite.formats import FormatError, NonFiniteError, block_scaled, nvfp4

pytest.importorskip("triton", reason="the Triton backend needs the package triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "nvfp4_te.safetensors")
FINITE = sorted({key.split("/")[0] for key in GOLDEN} - {"nan", "inf"})
MODES = {"1d": ((1, 16), "tensor"), "2d": ((16, 16), "tensor"), "row_scaled": ((1, 16), "row")}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# K of one block; odd block counts; powers of two; three chunks; more blocks than chunks allow; K of o_proj
SHAPES = ((16, 16), (5, 48), (32, 32), (3, 768), (64, 2048), (33, 2064), (16, 4096), (1, 2048))


def kernels():
    from minite.backends.triton import quantize

    return quantize


def assert_equal(x, block, outer, amax=None):
    wanted = nvfp4.quantize(x, block, outer, amax=amax)
    device_amax = None if amax is None else amax.cuda()
    got = kernels().quantize(x.cuda(), block, outer, device_amax)
    assert got.first_difference(wanted) is None, got.first_difference(wanted)
    values = block_scaled(wanted)
    assert_same_bytes(kernels().block_scaled(wanted.to("cuda")), values, "read back")
    if block == (1, 16):
        fake, fake_amax = kernels().fake_quantize(x.cuda(), outer, device_amax)
        assert_same_bytes(fake, values, "fake")
        assert_same_bytes(fake_amax, wanted.amax, "amax of fake")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", EDGE_INPUTS)
def test_edge_inputs(name, mode, dtype):
    for m, k in SHAPES:
        if m % MODES[mode][0][0] == 0:
            assert_equal(EDGE_INPUTS[name](m, k, dtype), *MODES[mode])


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FINITE)
def test_golden_inputs(name, mode):
    assert_equal(GOLDEN[f"{name}/input"], *MODES[mode])
    q = kernels().quantize(GOLDEN[f"{name}/input"].cuda(), *MODES[mode])
    assert_same_bytes(q.codes, GOLDEN[f"{name}/{mode}/codes"], "codes")
    assert_same_bytes(q.block_scale.view(torch.uint8), GOLDEN[f"{name}/{mode}/scales"], "scales")


@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_and_magnitudes(seed):
    g = seeded(seed)
    m, blocks, exponent = (int(torch.randint(lo, hi, (), generator=g)) for lo, hi in ((1, 70), (1, 300), (-130, 120)))
    x = torch.randn(m, 16 * blocks, generator=g) * 2.0**exponent
    assert_equal(x.to(DTYPES[0] if seed % 2 else DTYPES[2]), (1, 16), "row" if seed % 3 else "tensor")


def test_every_bfloat16_value_beside_every_size_of_block():
    """All finite BF16 values, each in a block whose amax is 2^0 to 2^14 times larger: 65,280 x 15 codes."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    value = bits.view(torch.bfloat16)[bits.view(torch.bfloat16).isfinite()].float()
    blocks = value[:, None].repeat(1, 16) * torch.exp2(-torch.arange(16.0))
    assert_equal(blocks.bfloat16().reshape(-1, 64), (1, 16), "row")


def test_experts_and_given_amax():
    x = normal(7, 48, 256) * torch.exp2(torch.arange(7.0) - 3).bfloat16()[:, None, None]
    for block in ((1, 16), (16, 16)):
        assert_equal(x, block, "expert")
        assert_equal(x, block, "expert", x.float().abs().amax((1, 2)) * 1.7)
    assert_equal(x[0], (1, 16), "tensor", torch.tensor(1e4))
    assert_equal(x[0], (1, 16), "row", x[0].float().abs().amax(-1) * 3)
    assert_equal(x[:, :0], (1, 16), "row")
    assert_equal(x[:, :0], (1, 16), "expert")


def test_strided_input():
    x = normal(64, 512)
    wanted = nvfp4.quantize(x[:, 128:256], outer="row")
    got = kernels().quantize(x.cuda()[:, 128:256], (1, 16), "row")
    assert got.bytes_equal(wanted)


def test_non_finite_activations_keep_a_non_finite_amax_and_spoil_no_other_row():
    from minite.backends.triton.backend import TritonBackend

    backend = TritonBackend(strict=False)
    x = normal(6, 128)
    x[1, 3], x[4, 100] = float("nan"), float("-inf")
    q = backend.quantize(x.cuda(), "nvfp4_row")
    assert q.amax[1].isnan() and q.amax[4].isinf()
    weight = backend.prepare(backend.quantize(normal(32, 128, seed=1).cuda(), "nvfp4_1d"))
    out = backend.gemm(q, weight, torch.bfloat16)
    rows = torch.tensor([0, 2, 3, 5])
    assert not out[[1, 4]].isfinite().any()
    clean = backend.gemm(backend.quantize(x[rows].cuda(), "nvfp4_row"), weight, torch.bfloat16)
    assert_same_bytes(out[rows.cuda()], clean)


def test_bad_weights_are_errors():
    from minite.backends.triton.backend import TritonBackend

    backend = TritonBackend(strict=False)
    w = normal(32, 64).cuda()
    with pytest.raises(FormatError, match="below"):
        backend.quantize(w, "nvfp4_1d", amax=torch.tensor(0.5))
    with pytest.raises(FormatError, match="K % 16"):
        backend.quantize(w[:, :40], "nvfp4_row")
    with pytest.raises(FormatError, match="expected float32"):
        backend.quantize(w, "nvfp4_row", amax=torch.ones(3))
    w[3, 5] = float("inf")
    with pytest.raises(NonFiniteError, match=r"inf at \[3, 5\]"):
        backend.quantize(w, "nvfp4_2d")
