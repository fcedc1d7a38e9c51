"""dgrad and wgrad in NVFP4: the formula on the very codes, what rounding and transform do on average, by expert."""

from __future__ import annotations

import exact
import pytest
import torch
from torch import Tensor

from minite.backends.registry import get_backend
from minite.formats import NonFiniteError, QTensor, block_scaled, nvfp4
from minite.formats.columnwise import quantize_columnwise
from minite.formats.hadamard import transform
from minite.layers.grouped_matmul import quant_grouped_matmul
from minite.layers.matmul import LinearSpec, quant_matmul

SPEC = LinearSpec("nvfp4_1d", "nvfp4_row", "nvfp4", "nvfp4")
BF16_BACKWARD = LinearSpec("nvfp4_1d", "nvfp4_row", "bf16", "bf16")
SEED = 7


def backend(strict: bool = False, name: str = "reference"):
    return get_backend(name, device="cpu", strict=strict)


def gradients(x: Tensor, w: Tensor, dy: Tensor, spec: LinearSpec, used, seed: int = SEED, rows=None):
    torch.manual_seed(seed)
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = quant_matmul(x, w, spec, used) if rows is None else quant_grouped_matmul(x, w, torch.tensor(rows), spec, used)
    y.backward(dy)
    return x.grad, w.grad


def values(q: QTensor) -> Tensor:
    """float64, outer scale included and not rounded."""
    amax = q.amax.double() / 2688
    return block_scaled(q, torch.float64) * amax.reshape(*amax.shape, *[1] * (len(q.shape) - amax.ndim))


def product(a: QTensor, b: QTensor) -> tuple[Tensor, float]:
    """As exact.forward_and_gradients gives it: value and magnitude of a @ b.T."""
    return multiplied(values(a), values(b))


def multiplied(a_MK: Tensor, b_NK: Tensor) -> tuple[Tensor, float]:
    return a_MK @ b_NK.T, float((a_MK.abs() @ b_NK.abs().T).max()) if a_MK.numel() else 0.0


def drawn(dy: Tensor, dy_columns: Tensor) -> tuple[QTensor, QTensor]:
    """Codes of dy by rows and of the transposed, transformed one, with the seeds of a backward pass, in its order."""
    torch.manual_seed(SEED)
    options = {"outer": "row", "rounding": "stochastic", "generator": torch.default_generator}
    return nvfp4.quantize(dy, **options), nvfp4.quantize(transform(dy_columns.T.contiguous()), **options)


def width(count: int) -> int:
    return max(1, -(-count // 64)) * 64


def padded(t: Tensor, rows: list[int]) -> Tensor:
    """Each expert's rows, followed by zeros up to a multiple of 64."""
    parts = [torch.cat([p, p.new_zeros(width(len(p)) - len(p), p.shape[1])]) for p in t.split(rows)]
    return torch.cat(parts)


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("m", [21, 64, 130])
def test_dense_gradients_are_the_formula(m, strict):
    n, k = 48, 32
    x, w, dy = exact.randn(m, k), exact.randn(n, k, seed=1), exact.randn(m, n, seed=2)
    dx, dw = gradients(x, w, dy, SPEC, backend(strict))
    dy_MN, dy_NM = drawn(dy, padded(dy, [m]))
    exact.assert_rounded_once(dx, product(dy_MN, quantize_columnwise(w)), n, strict)
    x_KM = nvfp4.quantize(transform(padded(x, [m]).T.contiguous()))
    exact.assert_rounded_once(dw, product(dy_NM, x_KM), m, strict)


@pytest.mark.parametrize("rows", [[3, 0, 70, 64], [0, 0, 0, 5]], ids=str)
@pytest.mark.parametrize("strict", [False, True])
def test_grouped_gradients_are_the_formula_by_expert(rows, strict):
    n, k, total = 32, 48, sum(rows)
    x, dy = exact.randn(total, k), exact.randn(total, n, seed=1)
    w_ENK = exact.randn(4, n, k, seed=2) * torch.tensor([1e-3, 1.0, 30.0, 0.1]).bfloat16()[:, None, None]
    dx, dw = gradients(x, w_ENK, dy, SPEC, backend(strict), rows=rows)
    x_whole, dy_whole = padded(x, rows), padded(dy, rows)
    room = width(total + 64 * 4) - len(dy_whole)  # as for any split of the rows
    dy_RN, dy_NR = drawn(dy, torch.cat([dy_whole, dy_whole.new_zeros(room, n)]))
    x_KR = nvfp4.quantize(transform(x_whole.T.contiguous()))
    row, column = 0, 0
    for e, count in enumerate(rows):
        part = nvfp4_part(dy_RN, slice(row, row + count))
        exact.assert_rounded_once(dx[row : row + count], product(part, quantize_columnwise(w_ENK[e])), n, strict)
        span = slice(column, column + width(count))
        exact.assert_rounded_once(dw[e], multiplied(values(dy_NR)[:, span], values(x_KR)[:, span]), count, strict)
        row, column = row + count, span.stop


def nvfp4_part(q: QTensor, part: slice) -> QTensor:
    codes = q.codes[part]
    return QTensor("nvfp4", codes, q.block_scale[part], q.amax[part], (len(codes), q.shape[1]), q.block)


def test_no_rows():
    dx, dw = gradients(exact.randn(0, 32), exact.randn(16, 32), exact.randn(0, 16), SPEC, backend())
    assert dx.shape == (0, 32) and torch.equal(dw, torch.zeros(16, 32).bfloat16())
    _, dw = gradients(exact.randn(0, 32), exact.randn(2, 16, 32), exact.randn(0, 16), SPEC, backend(), rows=[0, 0])
    assert torch.equal(dw, torch.zeros(2, 16, 32).bfloat16())


def test_the_mean_over_seeds_is_the_gradient_of_unrounded_dy():
    """STATS, 4 sigma: stochastic rounding leaves dx unbiased, whatever the seed; to nearest it would not be."""
    x, w, dy = exact.randn(8, 32), exact.randn(64, 32, seed=1), exact.randn(8, 64, seed=2)
    draws = torch.stack([gradients(x, w, dy, SPEC, backend(True), seed)[0].double() for seed in range(200)])
    target = dy.double() @ values(quantize_columnwise(w)).T
    sigma = draws.std(0) / len(draws) ** 0.5 + 1e-3  # and the rounding of dx to bfloat16
    assert float(draws.std()) > 0 and float(((draws.mean(0) - target).abs() / sigma).max()) < 4.5  # of 256 values
    nearest = values(nvfp4.quantize(dy, outer="row")) @ values(quantize_columnwise(w)).T
    assert float(((nearest - target).abs() / sigma).max()) > 10


def test_error_against_bf16_lies_in_a_band():
    """QUANT: two FP4 operands, one of them rounded stochastically: 0.1 to 0.25 of the gradient's own size."""
    x, w, dy = exact.randn(256, 64), exact.randn(64, 64, seed=1), exact.randn(256, 64, seed=2)
    plain, quantized = (gradients(x, w, dy, spec, backend()) for spec in (BF16_BACKWARD, SPEC))
    for a, b in zip(plain, quantized, strict=True):
        assert 0.1 < float((a - b).norm() / a.norm()) < 0.25


def test_an_outlier_of_a_token_is_spread_by_the_transform():
    """One huge dy in a block of 16 tokens would leave codes of 0 for the others; after H the error is of its size."""
    x, w, dy = exact.randn(64, 16), exact.randn(16, 16, seed=1), exact.randn(64, 16, seed=2) * 1e-2
    dy[5] = 50.0
    (_, plain), (_, quantized) = (gradients(x, w, dy, spec, backend()) for spec in (BF16_BACKWARD, SPEC))
    assert float((plain - quantized).norm() / plain.norm()) < 0.2


def test_one_choice_at_a_time_leaves_the_other_as_it_was():
    x, w, dy = exact.randn(8, 32), exact.randn(32, 32, seed=1), exact.randn(8, 32, seed=2)
    dx, dw = gradients(x, w, dy, BF16_BACKWARD, backend())
    for spec, changed in ((("nvfp4", "bf16"), (True, False)), (("bf16", "nvfp4"), (False, True))):
        got = gradients(x, w, dy, LinearSpec("nvfp4_1d", "nvfp4_row", *spec), backend())
        assert (not torch.equal(got[0], dx), not torch.equal(got[1], dw)) == changed


def test_seeds_come_from_torch_and_the_compiled_backend_agrees():
    x, w, dy = exact.randn(8, 32), exact.randn(32, 32, seed=1), exact.randn(8, 32, seed=2)
    first, again, other = (gradients(x, w, dy, SPEC, backend(), seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    compiled = gradients(x, w, dy, SPEC, backend(name="cpu"), 1)
    assert all(torch.equal(a, b) for a, b in zip(first, compiled, strict=True))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_gradient_that_is_not_finite_gives_one_and_no_error(value):
    """An error in one rank's backward pass would leave the others waiting."""
    x, w, dy = exact.randn(8, 32), exact.randn(32, 32, seed=1), exact.randn(8, 32, seed=2)
    dy[3, 4] = value
    assert all(g.isnan().all() for g in gradients(x, w, dy, SPEC, backend()))
    x[0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match="input of linear"):
        gradients(x, w, dy, SPEC, backend())
