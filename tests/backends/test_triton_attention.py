"""Attention and FP32-output products of the Triton backend on a GPU. BITWISE between batches, bounded against FP64."""

from __future__ import annotations

import pytest
import torch
from cases import normal
from tolerances import assert_same_bytes

from minite.layers import ops

pytest.importorskip("triton", reason="the Triton backend needs the package triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

LENGTHS = [5, 1, 0, 70, 130, 64, 400]
HEADS = [(8, 2, 16), (32, 4, 128), (6, 2, 64), (4, 4, 128)]  # query heads, KV heads, dimension


def packed(heads, kv_heads, dim, lengths=LENGTHS):
    total = sum(lengths)
    q, k, v = (normal(total, h, dim, seed=i).cuda() for i, h in enumerate((heads, kv_heads, kv_heads)))
    return q, k, v, torch.tensor([0, *lengths], device="cuda").cumsum(0), dim**-0.5


@pytest.mark.parametrize("shape", HEADS)
def test_attention_is_close_to_its_exact_value(fused, shape):
    """Half a unit of BF16, and 2^-12 of the weighted sum of |v|: FP32 scores of this size move a softmax by 2^-14."""
    q, k, v, cu, scale = packed(*shape)
    out = fused.attention(q, k, v, cu, scale)
    wide = [t.double() for t in (q, k, v)]
    exact = ops.attention(*wide, cu, scale, strict=True)
    spread = ops.attention(wide[0], wide[1], wide[2].abs(), cu, scale, strict=True)
    assert out.dtype == torch.bfloat16
    assert ((out.double() - exact).abs() <= 2.0**-8 * exact.abs() + 2.0**-12 * spread).all()


@pytest.mark.parametrize("cache", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", HEADS)
def test_decode_gives_the_bits_of_prefill(fused, shape, cache):
    """Every token of the longest sequences, from pools that hold NaN wherever a sequence has no key."""
    q, k, v, cu, scale = packed(*shape)
    k, v = k.to(cache), v.to(cache)
    out = fused.attention(q, k.bfloat16(), v.bfloat16(), cu, scale)
    for s in (3, 6):
        start, end = int(cu[s]), int(cu[s + 1])
        lengths = torch.arange(1, end - start + 1, device="cuda")
        pools = [torch.full((1000, *t.shape[1:]), float("nan"), device="cuda").to(cache) for t in (k, v)]
        for pool, t in zip(pools, (k, v), strict=True):
            pool[300 : 300 + end - start] = t[start:end]
        first = torch.full_like(lengths, 300)
        assert_same_bytes(fused.attention_decode(q[start:end], *pools, first, lengths, scale), out[start:end])


@pytest.mark.parametrize("shape", HEADS)
def test_scattered_keys_give_the_bits_of_keys_in_a_row(fused, shape):
    """As a cache with pages of one slot has them: prefill behind a prefix, and decode; NaN in every other slot."""
    q, k, v, cu, scale = packed(*shape)
    out, total = fused.attention(q, k, v, cu, scale), len(q)
    slots = torch.randperm(2 * total, generator=torch.Generator().manual_seed(0))[:total].cuda()
    pools = [torch.full((2 * total, *t.shape[1:]), float("nan"), device="cuda", dtype=t.dtype) for t in (k, v)]
    for pool, t in zip(pools, (k, v), strict=True):
        pool[slots] = t
    lengths = cu.diff()
    for prefix in (torch.zeros_like(lengths), torch.tensor([2, 0, 0, 69, 65, 63, 399], device="cuda")):
        new = torch.cat([torch.arange(int(cu[s] + prefix[s]), int(cu[s + 1])) for s in range(len(lengths))]).cuda()
        queries = torch.nn.functional.pad((lengths - prefix).cumsum(0), (1, 0))
        for integer in (torch.int32, torch.int64):  # SGLang has both
            where = [t.to(integer) for t in (queries, prefix, cu[:-1], slots)]
            assert_same_bytes(fused.attention_paged(q[new], *pools, *where, scale), out[new])
    some = lengths > 0
    last, first = cu[1:][some] - 1, cu[:-1][some].int()
    assert_same_bytes(fused.attention_decode(q[last], *pools, first, lengths[some].int(), scale, slots), out[last])


def test_a_sequence_has_the_same_bits_alone(fused):
    q, k, v, cu, scale = packed(32, 4, 128)
    out = fused.attention(q, k, v, cu, scale)
    for s in (0, 3, 4):
        rows = slice(int(cu[s]), int(cu[s + 1]))
        alone = torch.tensor([0, rows.stop - rows.start], device="cuda")
        assert_same_bytes(fused.attention(q[rows], k[rows], v[rows], alone, scale), out[rows])


def test_what_the_kernel_does_not_take_goes_step_by_step(fused):
    q, k, v, cu, scale = packed(4, 2, 48)
    assert fused.attention(q, k, v, cu, scale) is None
    wanted = ops.attention(q, k, v, cu, scale, strict=False)
    assert_same_bytes(ops.attention(q, k, v, cu, scale, False, fused), wanted)


def test_gradients_of_attention_are_those_of_the_steps(fused):
    grads = []
    for chosen in (None, fused):
        q, k, v, cu, scale = packed(8, 2, 64)
        leaves = [t.requires_grad_() for t in (q, k, v)]
        out = ops.attention(*leaves, cu, scale, False, chosen)
        grads.append(torch.autograd.grad(out, leaves, normal(*out.shape, seed=9).cuda()))
    for mine, theirs in zip(*grads, strict=True):
        assert_same_bytes(mine, theirs)


@pytest.mark.parametrize(("n", "k"), [(128, 2048), (1000, 64), (32, 48)])
def test_wide_linear_and_its_gradients(fused, n, k):
    """Gradients: BF16 halves of dy lose 2^-16 of it, FP32 sums and one BF16 rounding follow."""
    x, w = (normal(*shape, seed=i).cuda().requires_grad_() for i, shape in enumerate(((77, k), (n, k))))
    out = ops.wide_linear(x, w, False, fused)
    exact = x.double() @ w.double().T
    assert out.dtype == torch.float32
    assert ((out - exact).abs() <= k * 2.0**-23 * (x.double().abs() @ w.double().abs().T)).all()
    assert_same_bytes(ops.wide_linear(x[:3], w, False, fused), out[:3])
    dy = normal(77, n, dtype=torch.float32, seed=3).cuda()
    for got, left, right in zip(
        torch.autograd.grad(out, (x, w), dy), (dy.double(), dy.double().T), (w.double(), x.double()), strict=True
    ):
        bound = 2.0**-8 * (left @ right).abs() + 2.0**-15 * (left.abs() @ right.abs())
        assert ((got.double() - left @ right).abs() <= bound).all()
