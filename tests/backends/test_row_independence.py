"""Aligned on a CPU: a row's bits do not depend on its batch, through every operation that learner and sampler share.

BITWISE, for the CPU and the libraries that run it: in FP32 this is what was found, not what a library promises.
"""

from __future__ import annotations

import random

import pytest
import torch

from minite.backends.registry import get_backend
from minite.layers import ops
from minite.layers.matmul import LinearSpec, prepare_weight

SHAPES = [(64, 32), (64, 64), (192, 64), (19, 64), (4, 64), (960, 576), (576, 1536)]  # (N, K): tiny recipe, SmolLM2
SPECS = [("nvfp4_1d", "nvfp4_row"), ("nvfp4_1d", "bf16"), ("bf16", "bf16"), ("nvfp4_1d", "mxfp8")]
ROWS = 150


def randn(*shape, seed, dtype=torch.bfloat16):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_rows_independent(function, x, seed=0):
    """``function`` of any batch of rows of x, at any place, gives the rows of ``function(x)``."""
    whole, rng = function(x), random.Random(seed)
    assert whole.isfinite().all()
    for size in (1, 2, 3, 4, 5, 7, 31, 32, 33, *(rng.randint(1, len(x)) for _ in range(4))):
        rows = torch.tensor(rng.sample(range(len(x)), size))
        assert torch.equal(function(x[rows]), whole[rows]), f"a batch of {size} rows differs"


@pytest.mark.parametrize("weight, inp", SPECS)
@pytest.mark.parametrize("n, k", SHAPES)
def test_gemm(n, k, weight, inp):
    backend = get_backend("reference", device="cpu", strict=False)
    spec = LinearSpec(weight, inp, "bf16", "bf16")
    prepared = prepare_weight(randn(n, k, seed=1), spec.weight, backend, None, "w").operand

    def linear(x_MK):
        return backend.gemm(backend.quantize_input(x_MK, inp), prepared, torch.float32)

    assert_rows_independent(linear, randn(ROWS, k, seed=2), seed=n + k)


def test_grouped_gemm():
    backend = get_backend("reference", device="cpu", strict=False)
    experts, x_RK = 4, randn(ROWS, 64, seed=3)
    w_ENK = backend.prepare(backend.quantize(randn(experts, 96, 64, seed=4), "nvfp4_1d"))
    whole = torch.stack(  # every row through every expert
        [
            backend.grouped_gemm(
                backend.quantize_input(x_RK, "nvfp4_row"),
                w_ENK,
                torch.tensor([ROWS * (e == i) for i in range(experts)]),
                torch.float32,
            )
            for e in range(experts)
        ]
    )
    rows_E = torch.tensor([1, 3, 0, 40])
    out = backend.grouped_gemm(backend.quantize_input(x_RK[:44], "nvfp4_row"), w_ENK, rows_E, torch.float32)
    assert torch.equal(out, torch.cat([whole[0, :1], whole[1, 1:4], whole[3, 4:44]]))


@pytest.mark.parametrize("n", [4, 19, 256, 4096])
def test_lm_head_router_and_log_softmax(n):
    w_NK = randn(n, 64, seed=5)
    x_MK = randn(ROWS, 64, seed=6)
    assert_rows_independent(lambda x: ops.wide_linear(x, w_NK, False), x_MK)
    assert_rows_independent(lambda x: ops.log_softmax(ops.wide_linear(x, w_NK, False), False), x_MK)


@pytest.mark.parametrize("k", [1, 16, 48, 64, 576, 1536])
def test_norm_and_swiglu(k):
    w_K = 1 + randn(k, seed=7) / 8
    assert_rows_independent(lambda x: ops.rms_norm(x, w_K, 1e-6, False), randn(ROWS, k, seed=8, dtype=torch.float32))
    assert_rows_independent(lambda x: ops.swiglu(x, False), randn(ROWS, 2 * k, seed=9, dtype=torch.float32))


def test_combine():
    y_RH, prob_R = randn(2 * ROWS, 64, seed=10, dtype=torch.float32), torch.rand(2 * ROWS)

    def combine(token_T):
        rows = torch.stack([2 * token_T, 2 * token_T + 1], 1).flatten()
        of = torch.arange(len(token_T)).repeat_interleave(2)
        return ops.moe_combine(y_RH[rows], prob_R[rows], of, len(token_T), False)

    assert_rows_independent(combine, torch.arange(ROWS))


@pytest.mark.parametrize("heads, kv_heads, dim", [(4, 2, 16), (9, 3, 64)])
@pytest.mark.parametrize("seed", range(3))
def test_decode_attention_equals_packed_attention(heads, kv_heads, dim, seed):
    """A token decoded beside any others, its cache cut anywhere beyond it, has the bits of the packed sequence."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 90) for _ in range(7)]
    q, k, v = (randn(sum(lengths), n, dim, seed=seed * 3 + i) * 2 for i, n in enumerate((heads, kv_heads, kv_heads)))
    cu = torch.tensor([0, *lengths]).cumsum(0)
    packed = ops.attention(q, k, v, cu, dim**-0.5, strict=False)
    for _ in range(12):
        picked = rng.sample(range(7), rng.randint(1, 7))
        count = torch.tensor([rng.randint(1, lengths[s]) for s in picked])
        width = int(count.max()) + rng.randint(0, 9)
        caches = torch.full((2, len(picked), width, kv_heads, dim), float("nan"), dtype=q.dtype)
        for b, s in enumerate(picked):
            for cache, x in zip(caches, (k, v), strict=True):
                cache[b, : count[b]] = x[cu[s] : cu[s] + count[b]]
        token = cu[picked] + count - 1
        out = ops.attention_decode(q[token], *caches, count, dim**-0.5, strict=False)
        assert torch.equal(out, packed[token])
        s = picked[0]
        alone = slice(int(cu[s]), int(cu[s + 1]))
        sequence = ops.attention(q[alone], k[alone], v[alone], torch.tensor([0, lengths[s]]), dim**-0.5, strict=False)
        assert torch.equal(sequence, packed[alone])
