"""NativeBackend over operators that run on a CPU: which operator gets what, and that the whole equals the reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import ops_on_cpu
import pytest
import torch
from cases import normal, seeded

from minite.backends.cutlass import ops, wgrad
from minite.backends.cutlass.backend import NativeBackend
from minite.backends.cutlass.weights import NativeWeight
from minite.backends.doctor import check_backend
from minite.backends.reference import ReferenceBackend
from minite.errors import UserError
from minite.formats import FormatError, quantize_operand
from minite.layers.grouped_matmul import quant_grouped_matmul
from minite.layers.matmul import LinearSpec

ROOT = Path(__file__).parents[3]


@pytest.fixture
def backend(monkeypatch):
    """As constructed on a GPU, but for triton's place, which the reference takes."""
    for name in ("quantize", "amax", "swizzle", "gemm"):
        monkeypatch.setattr(ops, name, getattr(ops_on_cpu, name))
    made = NativeBackend.__new__(NativeBackend)
    made.strict, made._emulation = False, ReferenceBackend(strict=False)
    return made


def test_the_doctor_finds_nothing_wrong(backend):
    assert [(what, fault) for what, fault in check_backend(backend, "cpu") if fault] == []


@pytest.mark.parametrize("how", ["nvfp4_1d", "nvfp4_2d", "nvfp4_row", "nvfp4_tensor", "nvfp4_row_4o6", "mxfp8"])
@pytest.mark.parametrize("shape", [(48, 64), (3, 32, 64)], ids=str)
def test_quantizer_is_the_references(backend, how, shape):
    x = normal(*shape, seed=80) * torch.exp2(torch.arange(shape[0]) - 8.0).bfloat16().view(-1, *[1] * (len(shape) - 1))
    assert backend.quantize(x, how).first_difference(quantize_operand(x, how)) is None
    wide = x.float()  # not BF16: the emulation's
    assert backend.quantize(wide, how).first_difference(quantize_operand(wide, how)) is None


@pytest.mark.parametrize("how", ["nvfp4_1d", "nvfp4_row", "nvfp4_tensor"])
def test_a_given_amax_is_used(backend, how):
    x_MK = normal(16, 32, seed=81)
    amax = quantize_operand(x_MK, how).amax * 1.5
    got, expected = backend.quantize(x_MK, how, amax=amax), quantize_operand(x_MK, how, amax=amax)
    assert got.first_difference(expected) is None
    with pytest.raises(FormatError, match="amax"):
        backend.quantize(x_MK, how, amax=torch.ones(3))


def test_weights_with_nan_are_refused_and_activations_show_it(backend):
    x_MK = normal(4, 32, seed=82)
    x_MK[2, 5] = torch.nan
    with pytest.raises(UserError, match="NaN|finite"):
        backend.quantize(x_MK, "nvfp4_1d")


@pytest.mark.parametrize("input", ["nvfp4_row", "nvfp4_tensor", "nvfp4_row_4o6", "bf16", "fp8_row", "mxfp8"])
@pytest.mark.parametrize("weight", ["nvfp4_1d", "nvfp4_2d", "bf16", "fp8_tensor", "mxfp8"])
def test_every_pair_of_operands_gives_the_references_product(backend, weight, input):
    reference, sizes = backend._emulation, torch.tensor([3, 0, 9, 4])
    w_ENK, x_RK = normal(4, 32, 64, seed=83), normal(16, 64, seed=84)
    for w, product in ((w_ENK[0], "gemm"), (w_ENK, "grouped_gemm")):
        rows = () if product == "gemm" else (sizes,)
        got, expected = (
            getattr(b, product)(b.quantize(x_RK, input), b.prepare(b.quantize(w, weight)), *rows, torch.bfloat16)
            for b in (backend, reference)
        )
        assert torch.equal(got, expected), product  # K = 64: no float32 sum of these products rounds


def test_fp4_operands_do_reach_the_native_product(backend, monkeypatch):
    reached = []
    monkeypatch.setattr(ops, "gemm", lambda *operands: reached.append(operands[0].dtype) or torch.zeros(1))
    weight = backend.prepare(backend.quantize(normal(16, 32), "nvfp4_1d"))
    assert isinstance(weight, NativeWeight)
    backend.gemm(backend.quantize_input(normal(4, 32), "nvfp4_row"), weight, torch.bfloat16)
    assert reached == [torch.uint8]


def test_gradients_of_experts_in_nvfp4_are_the_references(backend, monkeypatch):
    """BITWISE: runs of 64 columns of codes, whose float32 sums do not round. dgrad goes the way of every product."""
    for name in ("swizzle_columns", "wgrad"):
        monkeypatch.setattr(wgrad, name, getattr(ops_on_cpu, name))
    rows, spec = torch.tensor([3, 0, 60, 4]), LinearSpec("nvfp4_1d", "nvfp4_row", "nvfp4", "nvfp4")
    results = []
    for used in (backend, backend._emulation):
        torch.manual_seed(0)
        x, w = normal(67, 64, seed=86).requires_grad_(), normal(4, 32, 64, seed=87).requires_grad_()
        quant_grouped_matmul(x, w, rows, spec, used).backward(normal(67, 32, seed=88))
        results.append((x.grad, w.grad))
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected) and bool((got != 0).any())


def test_what_is_not_supported_is_said(backend):
    x, w = (
        backend.quantize(normal(4, 32), "nvfp4_row"),
        backend.prepare(backend.quantize(normal(2, 16, 32), "nvfp4_1d")),
    )
    with pytest.raises(FormatError, match="a weight of experts; expected .N, K.; use grouped_gemm"):
        backend.gemm(x, w, torch.bfloat16)
    with pytest.raises(UserError, match="bfloat16 or float32, not torch.float64; use precision.backend=reference"):
        backend.grouped_gemm(x, w, torch.tensor([1, 3]), torch.float64)
    with pytest.raises(UserError, match="K is 48; expected a multiple of 32"):
        backend.prepare(backend.quantize(torch.randn(16, 48, generator=seeded(1)).bfloat16(), "nvfp4_1d"))


def test_fused_experts_equal_the_steps():
    """BITWISE: K = 64 and 32, where no sum rounds. Routing is a kernel of triton, run in its interpreter."""
    pytest.importorskip("triton", reason="routing is a kernel of the triton backend")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    script = Path(__file__).with_name("fused_interpreted.py")
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
