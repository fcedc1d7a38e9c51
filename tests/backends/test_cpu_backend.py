"""The compiled CPU backend equals the reference, byte for byte, wherever it does the work itself. BITWISE."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cases import EDGE_INPUTS, normal, seeded
from tolerances import assert_same_bytes

from minite.backends.cpu import compiled
from minite.backends.cpu.backend import CpuBackend
from minite.backends.cpu.dequantize import dequantize
from minite.backends.reference import ReferenceBackend
from minite.backends.registry import get_backend
from minite.config.operands import OPERANDS
from minite.errors import UserError
from minite.formats import FormatError, NonFiniteError, QTensor, block_scaled, quantize_operand
from minite.formats.nvfp4 import PLAIN_OPERANDS
from minite.formats.rounding import E2M1_VALUES

pytestmark = pytest.mark.usefixtures("poisoned_memory")

CPU, REFERENCE = CpuBackend(strict=False), ReferenceBackend(strict=False)
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROWS = {"nvfp4_2d": 48}  # a multiple of 16; else an odd number


def assert_equals_reference(x, how, amax=None):
    got, expected = CPU.quantize(x, how, amax=amax), REFERENCE.quantize(x, how, amax=amax)
    assert got.first_difference(expected) is None, f"{how} {x.dtype} {list(x.shape)}: {got.first_difference(expected)}"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", PLAIN_OPERANDS)
@pytest.mark.parametrize("name", EDGE_INPUTS)
def test_edge_inputs(name, how, dtype):
    for k in (16, 80, 272):
        assert_equals_reference(EDGE_INPUTS[name](ROWS.get(how, 7), k, dtype), how)


@pytest.mark.parametrize("how", PLAIN_OPERANDS)
def test_random_shapes_and_magnitudes(how):
    g = seeded(11)
    for seed in range(60):
        rows, blocks, exponent = (int(torch.randint(*r, (), generator=g)) for r in ((1, 40), (1, 30), (-135, 125)))
        x = torch.randn(rows * (16 if how == "nvfp4_2d" else 1), 16 * blocks, generator=g) * 2.0**exponent
        assert_equals_reference(x.clamp(-3e38, 3e38).to(DTYPES[0] if seed % 2 else DTYPES[2]), how)


@pytest.mark.parametrize("how", PLAIN_OPERANDS)
def test_every_finite_bfloat16(how):
    """In the order of their bits, so that a block holds near values, and mixed, so that it holds far ones."""
    x = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    x = x[x.isfinite()]
    x = x[: x.numel() - x.numel() % 256]
    for values in (x, x[torch.randperm(x.numel(), generator=seeded(1))]):
        assert_equals_reference(values.view(-1, 16), how)


@pytest.mark.parametrize("scale", [1.0, 2.0**-9, 1.75, 448.0])
def test_code_borders(scale):
    """Ties of E2M1, and the float32 values on either side, in a block whose scale is known: S_enc is 1 at amax 2688."""
    ladder = torch.tensor(E2M1_VALUES)
    ties = torch.cat(((ladder[1:] + ladder[:-1]) / 2, ladder)) * scale
    beside = [torch.nextafter(ties, torch.full_like(ties, end)) for end in (torch.inf, 0.0)]
    for values in (ties, *beside):
        x = torch.cat((values, torch.zeros(1))).clamp(max=6 * scale).repeat(2).view(2, 16)
        x[:, 15] = 6 * scale
        q = CPU.quantize(x * torch.tensor([[1.0], [-1.0]]), "nvfp4_1d", amax=torch.tensor(2688.0))
        assert float(q.block_scale.float()[0, 0]) == scale
        assert_equals_reference(x * torch.tensor([[1.0], [-1.0]]), "nvfp4_1d", torch.tensor(2688.0))


def test_scale_borders():
    """Block maxima whose scale lies on an E4M3 tie (amax 2688: S_enc is 1), and up to four float32 steps beside it."""
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = torch.cat(((e4m3[1:] + e4m3[:-1]) / 2, e4m3)) * 6
    x = torch.zeros(9 * ties.numel(), 16)
    x[:, 3] = torch.cat([(ties.view(torch.int32) + step).clamp(min=0).view(torch.float32) for step in range(-4, 5)])
    x = x.clamp(max=2688.0)
    x[:, 7] = -x[:, 3] / 3
    for amax in (2688.0, 5376.0, 2880.0, 9000.0):
        assert_equals_reference(x, "nvfp4_1d", torch.tensor(amax))
    scale = CPU.quantize(x, "nvfp4_1d", amax=torch.tensor(2688.0)).block_scale.view(torch.uint8)
    assert scale.unique().tolist() == list(range(127))


@pytest.mark.parametrize("how", ["nvfp4_1d", "nvfp4_2d"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_experts_and_a_given_amax(how, dtype):
    w_ENK = normal(3, 32, 64) * torch.tensor([1.0, 100.0, 0.0]).bfloat16()[:, None, None]
    w_ENK = w_ENK.to(dtype)
    assert CPU.quantize(w_ENK, how).outer == "expert"
    assert_equals_reference(w_ENK, how)
    assert_equals_reference(w_ENK, how, torch.tensor([300.0, 1e3, 7.0]))
    assert_equals_reference(w_ENK[1], how, torch.tensor([500.0]))


def test_rows_with_a_given_amax():
    x = normal(5, 48)
    assert_equals_reference(x, "nvfp4_row", 1.5 * x.float().abs().amax(-1))
    assert_equals_reference(x, "nvfp4_tensor", torch.tensor(64.0))
    assert_equals_reference(x, "nvfp4_tensor", torch.tensor(torch.inf))  # S_enc is 1 then


def test_leading_dimensions_strides_offsets_and_gradients():
    x = normal(6, 64, seed=5)
    assert_equals_reference(x.view(2, 3, 64), "nvfp4_row")
    for how in ("nvfp4_1d", "nvfp4_row"):
        assert_equals_reference(x.t().contiguous().t(), how)
        assert_equals_reference(normal(12, 192)[::2, 5:69], how)
        assert_equals_reference(normal(6 * 64 + 1).view(-1)[1:].view(6, 64), how)  # begins between two words
        assert_equals_reference(x.float().requires_grad_(), how)


@pytest.mark.parametrize("how", PLAIN_OPERANDS)
def test_no_rows_and_no_experts(how):
    assert_equals_reference(normal(0, 32), how)
    if how in ("nvfp4_1d", "nvfp4_2d"):
        assert_equals_reference(normal(0, 32, 32), how)
        assert_equals_reference(normal(2, 0, 32), how)


def test_inputs_are_not_written_to():
    x = normal(16, 64)
    before = x.clone()
    q = CPU.quantize(x, "nvfp4_2d")
    codes, scale = q.codes.clone(), q.block_scale.clone()
    CPU.gemm(x, CPU.prepare(q), torch.float32)
    assert_same_bytes(x, before)
    assert_same_bytes(q.codes, codes)
    assert_same_bytes(q.block_scale.view(torch.uint8), scale.view(torch.uint8))


def raised(backend, x, how, amax):
    with pytest.raises(FormatError) as caught:
        backend.quantize(x, how, amax=amax)
    return type(caught.value), str(caught.value)


BAD = {
    "nan": (torch.nan, None), "inf": (torch.inf, None), "-inf": (-torch.inf, None), "nan and amax": (torch.nan, 9.0),
    "amax too small": (1.0, 0.5), "amax of another dtype": (1.0, torch.tensor(9.0).bfloat16()),
    "amax of another shape": (1.0, torch.ones(5)),
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("how", PLAIN_OPERANDS)
@pytest.mark.parametrize("what", BAD)
def test_mistakes_are_told_in_the_words_of_the_reference(what, how, dtype):
    value, amax = BAD[what]
    x = normal(32, 48).to(dtype)
    x[20, 17] = value
    if isinstance(amax, float):
        amax = torch.full((32,) if how == "nvfp4_row" else (), amax)
    mine, theirs = (raised(backend, x, how, amax) for backend in (CPU, REFERENCE))
    assert mine == theirs
    assert (mine[0] is NonFiniteError) == ("nan" in what or "inf" in what)


@pytest.mark.parametrize("shape", [(4, 24), (16,), (4, 0), (4, 16)])
def test_shapes_and_dtypes_are_refused_in_the_words_of_the_reference(shape):
    x = normal(*shape).double() if shape == (4, 16) else normal(*shape)
    assert raised(CPU, x, "nvfp4_1d", None) == raised(REFERENCE, x, "nvfp4_1d", None)
    assert raised(CPU, normal(7, 32), "nvfp4_2d", None) == raised(REFERENCE, normal(7, 32), "nvfp4_2d", None)


def one_nan(x):
    """x with every NaN of the same bytes: which one torch writes depends on where in a vector it stands."""
    return torch.where(x.isnan(), torch.nan, x)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_reading_every_code_with_every_scale(dtype):
    """All 256 pairs of codes by all 256 scale bytes, negative and NaN ones too, by hand-made outer scales."""
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(8).repeat(256, 1)
    codes = codes.view(256, 256, 8).roll(1, -1).reshape(256, 2048)
    scale = torch.stack([torch.arange(256).roll(i) for i in range(256)]).to(torch.uint8).view(torch.float8_e4m3fn)
    for amax in (torch.tensor(3.7), torch.tensor(1e-42), torch.tensor(3e38), torch.rand(256, generator=seeded(2))):
        q = QTensor("nvfp4", codes, scale, amax, (256, 4096), (1, 16))
        for mine, theirs in ((dequantize(q, dtype), q.dequantize(dtype)),
                             (CPU._block_scaled(q, dtype), block_scaled(q, dtype))):  # fmt: skip
            assert mine.dtype == dtype
            assert_same_bytes(one_nan(mine), one_nan(theirs), f"{dtype}, amax {amax.flatten()[0]}")


def test_reading_rounds_ties_to_the_even_bfloat16():
    """2688 (1 + odd / 256) halves the way between two BF16 values, wherever float32 gives the quotient exactly."""
    amax_R = 2688 * (1 + torch.arange(1, 256, 2) / 256)
    one = torch.full((128, 8), 0x22, dtype=torch.uint8)  # codes of 1.0, under the scale 1.0
    q = QTensor("nvfp4", one, torch.ones(128, 1).to(torch.float8_e4m3fn), amax_R, (128, 16), (1, 16))
    exact = q.dequantize(torch.float32)[:, 0]
    ties = (exact.view(torch.int32) & 0xFFFF) == 0x8000
    down = ties & ((exact.view(torch.int32) & 0x10000) == 0)  # rounding up would be wrong
    assert down.sum() > 8
    assert_same_bytes(dequantize(q, torch.bfloat16), q.dequantize(torch.bfloat16))


def test_reading_experts_views_and_nothing():
    q = quantize_operand(normal(3, 32, 64), "nvfp4_1d")
    assert_same_bytes(dequantize(q, torch.bfloat16), q.dequantize(torch.bfloat16))
    assert dequantize(quantize_operand(normal(0, 32), "nvfp4_row"), torch.float32).shape == (0, 32)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("weight", [name for name, operand in OPERANDS.items() if "weight" in operand.roles])
@pytest.mark.parametrize("input", ["bf16", "nvfp4_row", "nvfp4_row_4o6", "mxfp8", "fp8_row"])
def test_products_are_those_of_the_reference(weight, input, strict):
    mine, theirs = CpuBackend(strict=strict), ReferenceBackend(strict=strict)
    x_RK, w_ENK, rows_E = normal(37, 128), normal(3, 128, 128, seed=1), torch.tensor([30, 0, 7])
    for out_dtype in (torch.bfloat16, torch.float32):
        for w, rows in ((w_ENK[0], ()), (w_ENK, (rows_E,))):
            outs = []
            for backend in (mine, theirs):
                product = backend.grouped_gemm if rows else backend.gemm
                prepared = backend.prepare(backend.quantize(w, weight))
                outs.append(product(backend.quantize(x_RK, input), prepared, *rows, out_dtype))
            assert_same_bytes(*outs, f"{weight} {input}")


def test_it_says_why_it_cannot_run(monkeypatch):
    assert "not on cuda" in CpuBackend.refused("cuda", False)
    assert CpuBackend.refused("cpu", True) is None
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("minite.backends.cpu.backend.find_spec", lambda name: None)
    assert get_backend("auto", device="cpu", strict=True).name == "reference"
    with pytest.raises(UserError, match="'cpu' cannot run on cpu: cpu: needs numba"):
        get_backend("cpu", device="cpu", strict=False)


def test_a_cache_that_cannot_be_made_is_told(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("MINITE_CACHE_DIR", str(tmp_path / "file"))
    compiled.folder.cache_clear()
    with pytest.raises(UserError, match="Not a directory.*MINITE_CACHE_DIR"):
        compiled.folder()


COLD = """
import hashlib, torch
from minite.backends.registry import get_backend
q = get_backend("cpu", device="cpu", strict=False).quantize(torch.randn(64, 256, generator=torch.Generator()
    .manual_seed(0)).bfloat16(), "nvfp4_row")
print(hashlib.sha256(q.codes.numpy().tobytes()).hexdigest())
"""


@pytest.mark.slow
def test_processes_that_start_together_share_an_empty_cache(tmp_path):
    def start():
        env = {**os.environ, "MINITE_CACHE_DIR": str(tmp_path)}
        return subprocess.Popen([sys.executable, "-c", COLD], env=env, stdout=subprocess.PIPE, text=True)

    outputs = {process.communicate(timeout=200)[0] for process in [start() for _ in range(2)]}
    assert len(outputs) == 1 and len(outputs.pop().strip()) == 64
    made = {file: file.stat().st_mtime_ns for file in Path(tmp_path).rglob("*.nb?")}
    assert made and all(file.relative_to(tmp_path).parts[0] == "numba" for file in made)
    start().communicate(timeout=200)
    assert {file: file.stat().st_mtime_ns for file in Path(tmp_path).rglob("*.nb?")} == made
