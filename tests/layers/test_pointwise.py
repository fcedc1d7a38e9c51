"""Row-wise operations against formulas written out in float64, and their independence of the batch."""

import math

import pytest
import torch

from minite.layers import ops

DTYPES = [torch.bfloat16, torch.float32]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def assert_rounded_once(actual, exact, dtype, work_error):
    """At most half a unit in the last place of the storage dtype, plus ``work_error`` relative to the largest value."""
    bound = torch.finfo(dtype).eps / 2 * exact.abs() * 1.001 + work_error * exact.abs().max()
    assert actual.dtype == dtype
    assert ((actual.double() - exact).abs() <= bound).all()


def work_error(strict):
    return 1e-14 if strict else 1e-6


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (7, 48), (3, 5, 128)])
def test_rms_norm_is_the_formula_rounded_once(dtype, strict, shape):
    x, w = randn(*shape, dtype=dtype) * 3, randn(shape[-1], dtype=dtype, seed=1)
    x64, w64 = x.double(), w.double()
    exact = x64 * w64 / (x64.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_rounded_once(ops.rms_norm(x, w, 1e-6, strict), exact, dtype, work_error(strict))


def test_rms_norm_of_zeros_is_zero():
    assert torch.equal(ops.rms_norm(torch.zeros(2, 8), torch.ones(8), 1e-6, False), torch.zeros(2, 8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strict", [False, True])
def test_rope_rotates_each_pair_by_position_times_frequency(dtype, strict):
    positions, head_dim, theta = torch.tensor([0, 1, 17, 40_959]), 16, 1e6
    x = randn(4, 3, head_dim, dtype=dtype)
    exact = torch.empty(4, 3, head_dim, dtype=torch.float64)
    for t, position in enumerate(positions.tolist()):
        for i in range(head_dim // 2):
            angle = position * theta ** (-2 * i / head_dim)
            a, b = x[t, :, i].double(), x[t, :, i + head_dim // 2].double()
            exact[t, :, i] = a * math.cos(angle) - b * math.sin(angle)
            exact[t, :, i + head_dim // 2] = b * math.cos(angle) + a * math.sin(angle)
    cos, sin = ops.rope_cos_sin(positions, head_dim, theta)
    assert cos.dtype == torch.float32 and cos.shape == (4, head_dim // 2)
    # the tables are FP32 in either mode: half a unit in the last place of each of two products
    assert_rounded_once(ops.apply_rope(x, cos, sin, strict), exact, dtype, 1.2e-7 if strict else 1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strict", [False, True])
def test_swiglu_takes_the_gate_from_the_first_half(dtype, strict):
    gate_up = randn(6, 32, dtype=dtype) * 4
    gate, up = gate_up.double().chunk(2, dim=-1)
    assert_rounded_once(ops.swiglu(gate_up, strict), gate / (1 + (-gate).exp()) * up, dtype, work_error(strict))


@pytest.mark.parametrize("strict, out", [(False, torch.float32), (True, torch.float64)])
def test_wide_linear_does_not_round_its_result(strict, out):
    x, w = randn(5, 64, dtype=torch.bfloat16), randn(9, 64, dtype=torch.bfloat16, seed=1)
    y = ops.wide_linear(x, w, strict)
    assert y.dtype == out
    torch.testing.assert_close(y.double(), x.double() @ w.double().T, rtol=0, atol=64 * 32 * torch.finfo(out).eps)


@pytest.mark.parametrize(
    "op",
    [
        lambda x, w: ops.rms_norm(x, w, 1e-6, True),
        lambda x, w: ops.swiglu(x * w, True),
        lambda x, w: ops.wide_linear(x, w.expand(3, -1), True),
        lambda x, w: ops.apply_rope(x[:, None, :], *ops.rope_cos_sin(torch.arange(len(x)), x.shape[1], 1e4), True),
    ],
    ids=["rms_norm", "swiglu", "wide_linear", "rope"],
)
def test_gradients(op):
    x, w = randn(3, 8, dtype=torch.float64).requires_grad_(), randn(8, dtype=torch.float64, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(op, (x, w))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strict_rows_do_not_depend_on_the_batch(dtype):
    x, w = randn(33, 96, dtype=dtype), randn(96, dtype=dtype, seed=1)
    cos, sin = ops.rope_cos_sin(torch.arange(33), 96, 1e6)
    whole = [ops.rms_norm(x, w, 1e-6, True), ops.swiglu(x, True), ops.apply_rope(x[:, None], cos, sin, True)]
    for row in (0, 7, 32):
        one = slice(row, row + 1)
        row_cos, row_sin = ops.rope_cos_sin(torch.tensor([row]), 96, 1e6)
        alone = [
            ops.rms_norm(x[one], w, 1e-6, True),
            ops.swiglu(x[one], True),
            ops.apply_rope(x[one][:, None], row_cos, row_sin, True),
        ]
        for a, b in zip(alone, whole, strict=True):
            assert torch.equal(a, b[one])
