"""Results do not depend on what shares the batch; decode equals prefill. Strict mode, where that is promised."""

import random

import pytest
import torch
from tiny_engine import DENSE, MOE, config, engine, requests

from minite.layers import ops
from minite.sampler.embedded import engine as engine_module
from minite.sampler.embedded.kv_cache import Prefill
from minite.sampler.engine import Completion

LOGPROB = 1e-12  # FP64 sums of about 100 terms of size 10 in another order: a few 1e-15


def same(a: Completion, b: Completion) -> None:
    assert a.tokens == b.tokens and a.finish_reason == b.finish_reason
    torch.testing.assert_close(torch.tensor(a.logprobs), torch.tensor(b.logprobs), rtol=0, atol=LOGPROB)
    if a.routed_experts is not None:
        assert torch.equal(a.routed_experts, b.routed_experts)


@pytest.mark.parametrize("model", [MOE, DENSE], ids=["moe", "dense"])
@pytest.mark.parametrize("fmt", ["bf16", "w4a4", "w4a4_2d", "w4a8", "w4a16", "w8a8"])
def test_alone_and_in_any_batch(model, fmt):
    cfg = config(model, fmt, alignment="strict")
    e = engine(cfg)
    wanted = requests(6, seed=1)
    alone = [e.generate([r])[0] for r in wanted]
    rng = random.Random(0)
    for trial in range(3):
        mixed = wanted + requests(rng.randrange(1, 40), seed=2 + trial)
        rng.shuffle(mixed)
        by_id = {c.request_id: c for c in e.generate(mixed)}
        for one in alone:
            same(by_id[one.request_id], one)


def test_small_batch_and_crowded_cache_change_nothing():
    wide = engine(config(alignment="strict"))
    narrow = engine(config(alignment="strict", sampler={"max_batch": 3, "kv_tokens": 45}))
    wanted = requests(25, seed=3)
    for a, b in zip(wide.generate(wanted), narrow.generate(wanted), strict=True):
        same(a, b)
    assert narrow.stats().decode_steps > wide.stats().decode_steps
    assert narrow.stats().kv_tokens_used == wide.stats().kv_tokens_used == 0


@pytest.mark.parametrize("model", [MOE, DENSE], ids=["moe", "dense"])
@pytest.mark.parametrize("fmt", ["bf16", "w4a4"])
def test_decode_equals_packed_prefill(model, fmt):
    e = engine(config(model, fmt, alignment="strict"))
    done = e.generate(requests(12, seed=4))
    sequences = [c.prompt_tokens + tuple(c.tokens) for c in done]
    logits, experts = packed_forward(e, sequences)
    flat, at = torch.tensor([t for s in sequences for t in s]), 0
    for c, s in zip(done, sequences, strict=True):
        rows = slice(at + len(c.prompt_tokens) - 1, at + len(s) - 1)
        targets = flat[at + len(c.prompt_tokens) : at + len(s)]
        recomputed = ops.token_logprob(logits[rows], targets, strict=True)
        torch.testing.assert_close(recomputed, torch.tensor(c.logprobs, dtype=torch.float64), rtol=0, atol=LOGPROB)
        if experts is not None:
            assert torch.equal(experts[at : at + len(s) - 1], c.routed_experts)
        at += len(s)


def packed_forward(e, sequences):
    """All logits of whole sequences in one prefill through the engine's model, into cache slots of their own."""
    lengths = torch.tensor([len(s) for s in sequences])
    cu = torch.nn.functional.pad(lengths.cumsum(0), (1, 0))
    position = torch.cat([torch.arange(n) for n in lengths.tolist()])
    slots = torch.arange(int(cu[-1]))
    attend = Prefill(e.cache, cu, slots, slots, e.scale, strict=True)
    with torch.inference_mode():
        return e.model.forward(torch.tensor([t for s in sequences for t in s]), position, attend, None)


def test_shared_prompts_are_prefilled_once_and_sampled_apart():
    e = engine(config(alignment="strict"))
    shared = requests(1, seed=5, max_new_tokens=8)[0]
    group = [
        type(shared)(f"g{i}", shared.prompt_tokens, type(shared.params)(max_new_tokens=8, seed=i)) for i in range(8)
    ]
    alone = [e.generate([r])[0] for r in group]
    before = e.stats().prefill_tokens
    for a, b in zip(alone, e.generate(group), strict=True):
        same(a, b)
    assert e.stats().prefill_tokens - before == len(shared.prompt_tokens)
    assert len({tuple(c.tokens) for c in alone}) > 1


def test_unaligned_depends_on_the_batch():
    """The contrast that shows the tests above could fail: a tensor-wide input scale couples the tokens of a call."""
    e = engine(config(MOE, "w4a4_tensor", alignment="off"))
    wanted = requests(6, seed=1, max_new_tokens=1)
    alone = [e.generate([r])[0].logprobs[0] for r in wanted]
    together = [c.logprobs[0] for c in e.generate(wanted)]
    assert max(abs(a - b) for a, b in zip(alone, together, strict=True)) > 1e-4


@pytest.mark.parametrize("limit", [1, 30, 10_000])
@pytest.mark.parametrize("model", [MOE, DENSE], ids=["moe", "dense"])
def test_scores_of_given_tokens_are_those_they_were_drawn_with(model, limit, monkeypatch):
    """Whole sequences in one pass, in batches of any size, against prefill and decode; the cache is left alone."""
    e = engine(config(model, "w4a4", alignment="strict"))
    done = e.generate(requests(8, seed=4))
    monkeypatch.setattr(engine_module, "SCORE_LOGITS", limit * e.config.model.vocab_size)
    before = [t.clone() for t in (*e.cache.k, *e.cache.v, e.cache.experts)]
    scores = list(e.logprobs([[*c.prompt_tokens, *c.tokens] for c in done]))
    for c, score_T in zip(done, scores, strict=True):
        assert score_T.dtype == torch.float64 and len(score_T) == len(c.prompt_tokens) + len(c.tokens) - 1
        expected_T = torch.tensor(c.logprobs, dtype=torch.float64)
        torch.testing.assert_close(score_T[len(c.prompt_tokens) - 1 :], expected_T, rtol=0, atol=LOGPROB)
    assert all(torch.equal(a, b) for a, b in zip(before, (*e.cache.k, *e.cache.v, e.cache.experts), strict=True))


def test_scores_see_the_cache_format():
    """With an FP8 KV cache a prefill attends to FP8 keys and values, and so do scores."""
    e = engine(config(DENSE, alignment="off", kv_cache="fp8", dtype="fp32"))
    done = e.generate(requests(4, seed=5))
    exact = engine(config(DENSE, alignment="off", dtype="fp32"))
    sequences = [[*c.prompt_tokens, *c.tokens] for c in done]
    for c, score_T, exact_T in zip(done, e.logprobs(sequences), exact.logprobs(sequences), strict=True):
        drawn_T = torch.tensor(c.logprobs)
        at = len(c.prompt_tokens) - 1
        torch.testing.assert_close(score_T[at:], drawn_T, rtol=0, atol=1e-4)  # FP32 sums, and an E4M3 code may flip
        if at:
            assert (exact_T[at:] - drawn_T).abs().max() > 1e-3
