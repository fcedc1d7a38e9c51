"""Routing, permutation and combination against plain loops; ties, replay, absent experts."""

import pytest
import torch

from minite.layers import ops


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def moe_loop(x, logits, k, scale_E):
    """A toy MoE in float64 whose expert e multiplies by scale_E[e]: softmax over all, top k, renormalise."""
    prob = logits.double().softmax(-1)
    out = torch.zeros(x.shape, dtype=torch.float64)
    for t in range(len(x)):
        chosen = sorted(range(logits.shape[1]), key=lambda e: (-float(logits[t, e]), e))[:k]
        for e in chosen:
            out[t] += prob[t, e] / prob[t, chosen].sum() * scale_E[e].double() * x[t].double()
    return out


def moe(x, logits, k, scale_E, strict):
    prob_Tk, expert_Tk = ops.route_topk(logits, k)
    x_RH, token_R, rows_E, slot_R = ops.moe_permute(x, expert_Tk, logits.shape[1])
    y_RH = x_RH * torch.repeat_interleave(scale_E, rows_E)[:, None]
    return ops.moe_combine(y_RH, prob_Tk.flatten()[slot_R], token_R, len(x), strict)


@pytest.mark.parametrize("tokens, experts, k", [(1, 1, 1), (13, 8, 2), (40, 5, 5), (0, 4, 2)])
def test_route_permute_combine_is_the_definition(tokens, experts, k):
    x, logits = randn(tokens, 6, dtype=torch.float64), randn(tokens, experts, dtype=torch.float64, seed=1)
    scale = randn(experts, seed=2)
    out = moe(x, logits, k, scale.double(), True)
    torch.testing.assert_close(out, moe_loop(x, logits, k, scale), rtol=0, atol=1e-14)


def test_ties_go_to_the_lowest_index():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0], [0.0, 0.0, -0.0, 0.0]])
    assert ops.route_topk(logits, 2)[1].tolist() == [[1, 2], [0, 1]]


def test_replay_takes_recorded_experts_and_own_choice_where_none_was_recorded():
    logits = randn(3, 6).requires_grad_()
    replay = torch.tensor([[5, 0], [-1, -1], [2, 3]], dtype=torch.int16)
    prob, expert = ops.route_topk(logits, 2, replay)
    own = ops.route_topk(logits, 2)
    assert expert.tolist() == [[5, 0], own[1][1].tolist(), [2, 3]]
    assert torch.equal(prob[1], own[0][1])
    torch.testing.assert_close(prob[0], logits[0, [5, 0]].softmax(0))
    prob[:, 0].sum().backward()
    assert (logits.grad[2] != 0).tolist() == [False, False, True, True, False, False]


def test_probabilities_keep_the_dtype_of_the_logits():
    assert ops.route_topk(randn(2, 4), 2)[0].dtype == torch.float32
    assert ops.route_topk(randn(2, 4, dtype=torch.float64), 2)[0].dtype == torch.float64


def test_permute_sorts_by_expert_then_token():
    x = torch.arange(4.0)[:, None]
    expert = torch.tensor([[2, 0], [0, 2], [2, 3], [3, 0]])
    x_RH, token_R, rows_E, slot_R = ops.moe_permute(x, expert, 6)
    assert rows_E.tolist() == [3, 0, 3, 2, 0, 0]
    assert token_R.tolist() == [0, 1, 3, 0, 1, 2, 2, 3]
    assert torch.equal(x_RH.squeeze(1), token_R.float())
    assert expert.flatten()[slot_R].tolist() == [0, 0, 0, 2, 2, 2, 3, 3]


def test_combine_adds_in_ascending_expert_order_and_rounds_once():
    # In FP32 (1e8 + 1) - 1e8 = 0 but (1e8 - 1e8) + 1 = 1: the order of the rows decides, not that of the slots.
    y, one = torch.tensor([[1e8], [1.0], [-1e8]]), torch.ones(3)
    token = torch.zeros(3, dtype=torch.int64)
    assert ops.moe_combine(y, one, token, 1, strict=False).item() == 0.0
    assert ops.moe_combine(y, one, token, 1, strict=True).item() == 1.0
    assert ops.moe_combine(y[[0, 2, 1]], one, token, 1, strict=False).item() == 1.0
    # BF16 rows 256 + 1 + 1 = 258; rounding after each addition would stay at 256.
    rows = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)
    assert ops.moe_combine(rows, one, token, 1, strict=False).item() == 258.0


def test_tokens_without_rows_get_zero():
    out = ops.moe_combine(torch.ones(1, 2), torch.ones(1), torch.tensor([1]), 3, strict=False)
    assert out.tolist() == [[0, 0], [1, 1], [0, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strict_moe_rows_do_not_depend_on_the_batch(dtype):
    x, logits, scale = randn(30, 16, dtype=dtype), randn(30, 8, dtype=torch.float64), randn(8, dtype=dtype)
    together = moe(x, logits, 3, scale, True)
    for t in (0, 11, 29):
        assert torch.equal(moe(x[t : t + 1], logits[t : t + 1], 3, scale, True), together[t : t + 1])


def test_gradients():
    x, logits = randn(5, 3, dtype=torch.float64).requires_grad_(), randn(5, 4, dtype=torch.float64).requires_grad_()
    scale = randn(4, dtype=torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(lambda *inputs: moe(inputs[0], inputs[1], 2, inputs[2], True), (x, logits, scale))


def test_permute_gradient_is_summed_wide_and_rounded_once():
    x = torch.zeros(1, 1, dtype=torch.bfloat16, requires_grad=True)
    x_RH, *_ = ops.moe_permute(x, torch.tensor([[0, 1, 2]]), 3)
    x_RH.backward(torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16))
    assert x.grad.item() == 258.0
