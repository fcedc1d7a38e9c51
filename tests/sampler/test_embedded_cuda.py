"""The same engine on a GPU: weights verify there, strict results equal the CPU's and do not depend on the batch."""

import random

import pytest
import torch
from tiny_engine import DENSE, MOE, config, load, requests, shipment

from minite.config import resolve_plan
from minite.sampler.embedded import EmbeddedEngine

STRICT = 1e-8  # FP64 sums in another order can move a BF16 rounding only if they hit a tie within 1e-16


def on(device: str, cfg) -> EmbeddedEngine:
    e = EmbeddedEngine(cfg, resolve_plan(cfg), device)
    buckets, version = shipment(cfg)
    assert load(e, buckets, version) == version.weight_digest
    return e


@pytest.mark.gpu
@pytest.mark.parametrize("model", [MOE, DENSE], ids=["moe", "dense"])
@pytest.mark.parametrize("fmt", ["bf16", "w4a4", "w4a8"])
def test_strict_equals_the_cpu_in_any_batch(model, fmt):
    cfg = config(model, fmt, alignment="strict")
    gpu, wanted = on("cuda", cfg), requests(12, seed=1)
    mixed = wanted + requests(20, seed=2)
    random.Random(0).shuffle(mixed)
    together = {c.request_id: c for c in gpu.generate(mixed)}
    for c in on("cpu", cfg).generate(wanted):
        other = together[c.request_id]
        assert other.tokens == c.tokens
        torch.testing.assert_close(torch.tensor(other.logprobs), torch.tensor(c.logprobs), rtol=0, atol=STRICT)
        assert c.routed_experts is None or torch.equal(other.routed_experts, c.routed_experts)


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
def test_aligned_and_truncated_sampling_run(kv_cache):
    e = on("cuda", config(MOE, "w4a4", alignment="off", kv_cache=kv_cache))
    done = e.generate(requests(40, seed=3, top_p=0.8, top_k=10, temperature=0.7))
    assert all(torch.isfinite(torch.tensor(c.logprobs)).all() for c in done)
