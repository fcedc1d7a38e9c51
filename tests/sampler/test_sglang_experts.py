"""A layer's experts, without what a CUDA graph forbids, against the functions the learner uses: bit for bit."""

import pytest
import torch

from minite.backends.registry import get_backend
from minite.config.plan import PlanEntry
from minite.layers import ops
from minite.sampler.embedded.weights import Linear
from minite.sampler.sglang.experts import forward

HIDDEN, WIDE = 32, 48


def entry(name: str, n: int, k: int, weight: str, input: str) -> PlanEntry:
    return PlanEntry(name, n, k, "test", weight, input, "bf16", "bf16", None, "a test")


def make_linear(names, experts, n, k, weight, input, backend, g, dtype):
    """A grouped GEMM with random weights, its members under one amax."""
    members = [[entry(f"e{e}.{name}", n, k, weight, input) for name in names] for e in range(experts)]
    linear = Linear(members, True, dtype, torch.device("cpu"))
    for e in range(experts):
        stacked = (torch.randn(n * len(names), k, generator=g) * k**-0.5).to(dtype)
        q = backend.quantize(stacked, weight)
        if weight == "bf16":
            linear.buffers["weight"][e] = stacked
            continue
        linear.buffers["weight"][e], linear.buffers["weight_scale"][e] = q.codes, q.block_scale
        linear.buffers["weight_amax"][e] = q.amax
    linear.prepare(backend)
    return linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("weight", "input"), [("nvfp4_1d", "nvfp4_row"), ("nvfp4_1d", "bf16"), ("bf16", "bf16")])
@pytest.mark.parametrize(("tokens", "experts", "k"), [(1, 4, 1), (7, 4, 2), (33, 8, 3), (5, 3, 3)])
def test_equal_to_the_functions_of_the_learner(tokens, experts, k, weight, input, dtype):
    g = torch.Generator().manual_seed(tokens)
    backend = get_backend("reference", device="cpu", strict=False)
    made = (experts, weight, input, backend, g, dtype)
    gate_up = make_linear(("gate", "up"), made[0], WIDE, HIDDEN, *made[1:])
    down = make_linear(("down",), made[0], HIDDEN, WIDE, *made[1:])
    x_TH = torch.randn(tokens, HIDDEN, generator=g).to(dtype)
    logits_TE = torch.randn(tokens, experts, generator=g)
    prob_Tk, expert_Tk = ops.route_topk(logits_TE, k)
    h_RH, token_R, rows_E, slot_R = ops.moe_permute(x_TH, expert_Tk, experts)
    h_R2I = backend.grouped_gemm(backend.quantize(h_RH, input), gate_up.prepared, rows_E, dtype)
    a_RI = backend.quantize(ops.swiglu(h_R2I, strict=False), input)
    y_RH = backend.grouped_gemm(a_RI, down.prepared, rows_E, dtype)
    expected = ops.moe_combine(y_RH, prob_Tk.flatten()[slot_R], token_R, tokens, strict=False)
    assert torch.equal(forward(backend, gate_up, down, x_TH, logits_TE, expert_Tk.to(torch.int32)), expected)


def test_padding_marked_by_minus_one_disturbs_nobody():
    g = torch.Generator().manual_seed(1)
    backend = get_backend("reference", device="cpu", strict=False)
    made = (4, "nvfp4_1d", "nvfp4_row", backend, g, torch.float32)
    gate_up = make_linear(("gate", "up"), made[0], WIDE, HIDDEN, *made[1:])
    down = make_linear(("down",), made[0], HIDDEN, WIDE, *made[1:])
    x_TH, logits_TE = torch.randn(6, HIDDEN, generator=g), torch.randn(6, 4, generator=g)
    _, expert_Tk = ops.route_topk(logits_TE, 2)
    alone = forward(backend, gate_up, down, x_TH[:4], logits_TE[:4], expert_Tk[:4])
    padded_Tk = expert_Tk.clone()
    padded_Tk[4:] = -1
    assert torch.equal(forward(backend, gate_up, down, x_TH, logits_TE, padded_Tk)[:4], alone)
