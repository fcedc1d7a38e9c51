"""quant_grouped_matmul against the dense formulas expert by expert; empty experts, no rows, both forms of weights."""

import exact
import pytest
import torch
from torch import nn

from minite.backends.registry import get_backend
from minite.layers.grouped_linear import QuantGroupedLinear
from minite.layers.grouped_matmul import quant_grouped_matmul
from minite.layers.matmul import AmaxHooks, LinearSpec

CHOICES = [("bf16", "bf16"), ("bf16", "dequantized"), ("dequantized", "bf16"), ("dequantized", "dequantized")]
W4A4 = LinearSpec("nvfp4_1d", "nvfp4_row", "bf16", "bf16")


def reference(strict=False):
    return get_backend("reference", device="cpu", strict=strict)


@pytest.mark.parametrize("stacked, strict", [(False, True), (True, False)])
@pytest.mark.parametrize("dgrad, wgrad", CHOICES)
@pytest.mark.parametrize("weight, input", [("bf16", "bf16"), ("nvfp4_1d", "nvfp4_row"), ("nvfp4_2d", "mxfp8")])
@pytest.mark.parametrize("rows", [[3, 0, 1, 17], [0, 0, 0, 0]], ids=str)
def test_every_expert_is_its_own_linear(weight, input, dgrad, wgrad, strict, stacked, rows):
    spec = LinearSpec(weight, input, dgrad, wgrad)
    n, k, total = 32, 64, sum(rows)
    x, dy = exact.randn(total, k).requires_grad_(), exact.randn(total, n, seed=1)
    # experts of very different size: one scale over all of them would lose the small ones
    w_ENK = exact.randn(4, n, k, seed=2) * torch.tensor([1e-3, 1.0, 30.0, 0.1]).bfloat16()[:, None, None]
    parts = [w_ENK.clone().requires_grad_()] if stacked else [w.clone().requires_grad_() for w in w_ENK]
    y = quant_grouped_matmul(x, parts[0] if stacked else parts, torch.tensor(rows), spec, reference(strict))
    y.backward(dy)
    dw = parts[0].grad if stacked else [w.grad for w in parts]
    start = 0
    for e, count in enumerate(rows):
        span = slice(start, start + count)
        start += count
        expected = exact.forward_and_gradients(x.detach()[span], w_ENK[e], dy[span], spec)
        for actual, value, length in zip((y.detach()[span], x.grad[span], dw[e]), expected, (k, n, count), strict=True):
            exact.assert_rounded_once(actual, value, length, strict)


def test_a_single_expert_as_a_list():
    w, x = exact.randn(16, 32).requires_grad_(), exact.randn(3, 32, seed=1)
    quant_grouped_matmul(x, [w], torch.tensor([3]), W4A4, reference()).sum().backward()
    assert w.grad.shape == (16, 32)


def test_weight_hook_gets_the_amax_of_all_experts_at_once():
    w_ENK, seen = exact.randn(3, 16, 32), []
    hooks = AmaxHooks(reduce_weight_amax=lambda amax: seen.append(amax) or 3 * amax)
    x, rows = exact.randn(3, 32, seed=1), torch.tensor([1, 1, 1])
    y = quant_grouped_matmul(x, w_ENK, rows, W4A4, reference(), None, hooks)
    assert len(seen) == 1 and torch.equal(seen[0], w_ENK.abs().amax((1, 2)).float())
    assert not torch.equal(y, quant_grouped_matmul(x, w_ENK, rows, W4A4, reference()))


def test_strict_rows_do_not_depend_on_other_rows_or_experts():
    w_ENK, x, backend = exact.randn(4, 32, 64), exact.randn(20, 64, seed=1), reference(strict=True)
    rows = torch.tensor([4, 0, 9, 7])
    together = quant_grouped_matmul(x, w_ENK, rows, W4A4, backend)
    for row, expert in ((0, 0), (4, 2), (12, 2), (19, 3)):
        alone = nn.functional.one_hot(torch.tensor(expert), 4)
        assert torch.equal(quant_grouped_matmul(x[row : row + 1], w_ENK, alone, W4A4, backend), together[row : row + 1])


def test_module_forms_agree_and_name_their_parameters():
    w_ENK, x, rows = exact.randn(3, 16, 32), exact.randn(6, 32, seed=1), torch.tensor([1, 2, 3])
    stacked = QuantGroupedLinear(nn.Parameter(w_ENK), W4A4, reference())
    separate = QuantGroupedLinear([nn.Parameter(w) for w in w_ENK], W4A4, reference())
    assert list(dict(stacked.named_parameters())) == ["weight"]
    assert list(dict(separate.named_parameters())) == ["weight0", "weight1", "weight2"]
    assert torch.equal(stacked(x, rows), separate(x, rows))
