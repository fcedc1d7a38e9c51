"""What stands between the GEMMs of a layer, on a GPU: norms, heads, routing. BITWISE against their definitions."""

from __future__ import annotations

import pytest
import torch
from cases import exact_norm, normal, seeded
from tolerances import assert_same_bytes

from minite.layers import ops

pytest.importorskip("triton", reason="the Triton backend needs the package triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

EPS = 1e-6


def scaled(*shape, seed=0):
    size = torch.exp2(torch.randint(-6, 7, (*shape[:-1], 1), generator=seeded(seed))).bfloat16()
    return normal(*shape, seed=seed) * size


@pytest.mark.parametrize("k", [16, 48, 128, 768, 2048, 4096, 5120])
@pytest.mark.parametrize("rows", [1, 7, 333])
def test_norm_of_a_sum_has_one_value(fused, rows, k):
    x, y, w = scaled(rows, k), scaled(rows, k, seed=1), normal(k, seed=2)
    total, normed = fused.add_rms_norm(x.cuda(), y.cuda(), w.cuda(), EPS)
    assert_same_bytes(total, x + y, "sum")
    assert_same_bytes(normed, exact_norm(x + y, w, EPS), "norm of the sum")
    assert_same_bytes(fused.rms_norm(x.cuda(), w.cuda(), EPS), exact_norm(x, w, EPS), "norm")


def test_gradients_of_the_norm_are_those_of_the_steps(fused):
    leaves = [scaled(30, 5, 128).cuda().requires_grad_(), normal(128, seed=1).cuda().requires_grad_()]
    dy = normal(30, 5, 128, seed=2).cuda()
    grads = [torch.autograd.grad(ops.rms_norm(*leaves, EPS, False, chosen), leaves, dy) for chosen in (None, fused)]
    for mine, theirs in zip(*grads, strict=True):
        assert_same_bytes(mine, theirs)
    wide = leaves[0].detach().float()
    assert fused.rms_norm(wide, leaves[1], EPS) is None
    assert_same_bytes(ops.rms_norm(wide, leaves[1], EPS, False, fused), ops.rms_norm(wide, leaves[1], EPS, False))


@pytest.mark.parametrize("normed", [True, False])
@pytest.mark.parametrize(("q_heads", "kv", "dim"), [(4, 2, 16), (32, 4, 128), (6, 3, 64), (5, 1, 256)])
def test_heads_have_the_bits_of_the_steps(fused, q_heads, kv, dim, normed):
    """Of the learner's steps: its norms by the kernel above, rotation and copies by torch."""
    tokens = 37
    qkv = scaled(tokens, q_heads + 2 * kv, dim).cuda()
    norms = (normal(dim, seed=1).cuda(), normal(dim, seed=2).cuda()) if normed else None
    cos, sin = ops.rope_cos_sin(torch.randint(0, 40000, (tokens,), generator=seeded(3)).cuda(), dim, 1e6)
    q, k, v = qkv.split((q_heads, kv, kv), dim=1)
    if norms:
        q, k = (ops.rms_norm(t, w, EPS, False, fused) for t, w in zip((q, k), norms, strict=True))
    wanted = ops.apply_rope(q, cos, sin, False), ops.apply_rope(k, cos, sin, False), v.contiguous()
    for got, value in zip(fused.heads(qkv, kv, norms, EPS, cos, sin), wanted, strict=True):
        assert_same_bytes(got, value)
    pools = [torch.full((100, kv, dim), 7.0, dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    slots = torch.randperm(100, generator=seeded(4))[:tokens].cuda()
    q, *places = fused.heads(qkv[:tokens], kv, norms, EPS, cos, sin, (*pools, slots))
    assert_same_bytes(q, wanted[0])
    for place, pool, value in zip(places, pools, wanted[1:], strict=True):
        assert place is pool
        expected = torch.full_like(pool, 7.0)
        expected[slots] = value
        assert_same_bytes(pool, expected)


@pytest.mark.parametrize(("experts", "top"), [(4, 2), (128, 8), (100, 6), (8, 1), (512, 10), (64, 4)])
@pytest.mark.parametrize("tokens", [1, 64, 333])
def test_routes_have_the_bits_of_the_layer(fused, tokens, experts, top):
    for logits in (
        normal(tokens, experts, dtype=torch.float32).cuda() * 3,
        (normal(tokens, experts, dtype=torch.float32) * 2).round().cuda(),  # ties, and zeros of both signs
    ):
        logits[0, 1] = float("-inf")
        for got, wanted in zip(fused.route(logits, top), ops.route_topk(logits, top), strict=True):
            assert_same_bytes(got, wanted)
    broken = torch.full((3, experts), float("nan"), device="cuda")
    assert fused.route(broken, top)[1].tolist() == [list(range(top))] * 3


@pytest.mark.parametrize("tokens", [1, 9, 64, 512, 513, 3000])
def test_rows_are_sorted_by_expert_and_token(tokens):
    from minite.backends.triton import moe

    experts, top = 128, 8
    expert = torch.rand(tokens, experts, generator=seeded(5)).topk(top).indices.cuda()
    routing = moe.Routing.of(expert, experts)
    flat, slot = expert.flatten().sort(stable=True)
    assert_same_bytes(routing.token_R, slot // top)
    assert_same_bytes(routing.rows_E, torch.bincount(flat, minlength=experts))
    assert routing.position_Tk.flatten()[slot].equal(torch.arange(len(slot), dtype=torch.int32, device="cuda"))
    x, amax = normal(tokens, 2064).cuda(), normal(tokens, dtype=torch.float32).cuda()
    rows, scales = routing.spread(x, amax)
    assert_same_bytes(rows, x[routing.token_R])
    assert_same_bytes(scales, amax[routing.token_R])
