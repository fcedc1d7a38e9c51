"""Packed and decode attention against a loop written out in float64; strict results free of the batch."""

import pytest
import torch

from minite.layers import ops

LENGTHS = [[1], [5], [3, 1, 8], [2, 0, 33, 7, 1, 12], [0, 0, 4]]


def make(lengths, heads=4, kv_heads=2, head_dim=16, dtype=torch.bfloat16, seed=0):
    generator = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q, k, v = (
        torch.randn(total, n, head_dim, generator=generator, dtype=torch.float64).to(dtype)
        for n in (heads, kv_heads, kv_heads)
    )
    cu = torch.tensor([0, *lengths]).cumsum(0)
    return q, k, v, cu


def attention_loop(q, k, v, cu, scale):
    """The definition, one query and head at a time."""
    out = torch.empty(q.shape, dtype=torch.float64)
    group = q.shape[1] // k.shape[1]
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        for t in range(start, end):
            for h in range(q.shape[1]):
                keys, values = k[start : t + 1, h // group].double(), v[start : t + 1, h // group].double()
                out[t, h] = (keys @ q[t, h].double() * scale).softmax(0) @ values
    return out


def decode_all(q, k, v, cu, scale, strict, garbage=float("nan")):
    """Every position of every sequence through attention_decode, all sequences of a step in one batch."""
    lengths = cu.diff()
    longest = int(lengths.max())
    shape = (len(lengths), longest, *k.shape[1:])
    k_cache, v_cache = torch.full(shape, garbage, dtype=k.dtype), torch.full(shape, garbage, dtype=v.dtype)
    out = torch.empty_like(q)
    for step in range(longest):
        live = (lengths > step).nonzero().squeeze(-1)
        token = cu[live] + step
        k_cache[live, step], v_cache[live, step] = k[token], v[token]
        width = step + 1 if step % 2 else longest  # a cut and an uncut cache must agree
        step_length = torch.full((len(live),), step + 1)
        caches = k_cache[live][:, :width], v_cache[live][:, :width]
        out[token] = ops.attention_decode(q[token], *caches, step_length, scale, strict)
    return out


@pytest.mark.parametrize("strict, tolerance", [(False, 2e-6), (True, 1e-14)])
@pytest.mark.parametrize("heads, kv_heads", [(4, 2), (3, 3), (4, 1)])
@pytest.mark.parametrize("lengths", LENGTHS, ids=str)
def test_packed_attention_is_the_definition(lengths, heads, kv_heads, strict, tolerance):
    dtype = torch.float64 if strict else torch.float32  # storage as wide as the work: nothing hides behind rounding
    q, k, v, cu = make(lengths, heads, kv_heads, dtype=dtype)
    out = ops.attention(q, k, v, cu, 0.25, strict)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), attention_loop(q, k, v, cu, 0.25), rtol=0, atol=tolerance)


@pytest.mark.parametrize("strict, tolerance", [(False, 2e-6), (True, 1e-14)])
def test_decode_is_the_definition_and_reads_nothing_beyond_the_length(strict, tolerance):
    q, k, v, cu = make([3, 1, 8, 20], dtype=torch.float64 if strict else torch.float32)
    out = decode_all(q, k, v, cu, 0.25, strict)
    torch.testing.assert_close(out.double(), attention_loop(q, k, v, cu, 0.25), rtol=0, atol=tolerance)


def test_batch_of_no_tokens():
    q, k, v, cu = make([0, 0])
    assert ops.attention(q, k, v, cu, 1.0, False).shape == (0, 4, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(5))
def test_strict_decode_equals_packed_prefill_bitwise(dtype, seed):
    lengths = torch.randint(1, 40, (9,), generator=torch.Generator().manual_seed(seed)).tolist()
    q, k, v, cu = make(lengths, dtype=dtype, seed=seed)
    packed = ops.attention(q, k, v, cu, 0.25, True)
    assert torch.equal(packed, decode_all(q, k, v, cu, 0.25, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("seed", range(5))
def test_strict_packed_sequences_do_not_see_each_other(dtype, seed):
    lengths = torch.randint(1, 70, (8,), generator=torch.Generator().manual_seed(seed)).tolist()
    q, k, v, cu = make(lengths, dtype=dtype, seed=seed)
    together = ops.attention(q, k, v, cu, 0.25, True)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        alone = [x[start:end] for x in (q, k, v)]
        assert torch.equal(ops.attention(*alone, torch.tensor([0, end - start]), 0.25, True), together[start:end])


def test_a_nan_stays_in_its_sequence():
    q, k, v, cu = make([3, 4, 2], dtype=torch.float32)
    v[4] = float("nan")
    out = ops.attention(q, k, v, cu, 0.25, False)
    assert out[:3].isfinite().all() and out[7:].isfinite().all() and out[4:7].isnan().all()


def test_gradients_of_mixed_lengths():
    q, k, v, cu = make([2, 0, 5, 1], head_dim=4, dtype=torch.float64)
    inputs = tuple(x.requires_grad_() for x in (q, k, v))
    assert torch.autograd.gradcheck(lambda q, k, v: ops.attention(q, k, v, cu, 0.3, True), inputs)
