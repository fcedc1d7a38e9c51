"""Real SGLang on its CPU engine against the built-in sampler and the learner: one small model in FP32, W4A4.

In FP32 both sides quantize nearly equal inputs to equal codes: tokens are the same, log-probs differ by sums only.
"""

from __future__ import annotations

import random
import threading
from contextlib import closing
from dataclasses import replace
from unittest import mock

import psutil
import pytest
import torch
from real_sglang import NEEDS_SGLANG, sglang_engine
from test_sglang_inside import converted
from tiny_engine import MOE, engine, load, requests, shipment

from minite.config import resolve_plan
from minite.diagnostics.layerwise import compare
from minite.driver.buffer import Group, pack
from minite.driver.data import Example, Prompt
from minite.driver.gap.layers import watch_learner, watch_sampler
from minite.driver.gap.local import Pair, start_learner
from minite.driver.gap.subject import Subject
from minite.errors import UserError
from minite.learner.worker import LearnerWorker
from minite.ports import free_port
from minite.sampler.engine import Request, SamplingParams
from minite.sampler.sglang.names import expected_modules
from minite.sync.errors import SyncError
from minite.sync.flat import flatten
from minite.sync.transport import MANIFEST
from tests.tolerances import FP32_ENGINE_GAP

pytestmark = NEEDS_SGLANG
UPDATES = 52  # two before the memory is read, then fifty
MAX_GROWTH = 32 << 20  # bytes that a scheduler may grow over them: allocator slack; the weights alone are 0.2 MB


@pytest.fixture(scope="module")
def moe():
    """A recipe and its engine. Every test loads the weights it wants."""
    cfg, made = sglang_engine(MOE, "w4a4", dtype="fp32")
    yield cfg, made
    made.close()


def test_nothing_is_sampled_before_weights_are_proven(moe):
    _, sglang = moe
    with pytest.raises(SyncError, match="refusing to generate"):
        sglang.generate(requests(1))


def test_same_tokens_experts_and_logprobs_as_the_built_in_sampler(moe):
    cfg, sglang = moe
    for seed in range(3):
        load(sglang, *shipment(cfg, seed, step=seed))
        asked = [
            *requests(20, seed),
            *requests(4, seed + 50, temperature=0.0),
            *requests(4, seed + 90, top_k=5, top_p=0.8),
        ]
        built_in = engine(cfg, seed)
        for got, expected in zip(sglang.generate(asked), built_in.generate(asked), strict=True):
            assert got.tokens == expected.tokens and got.finish_reason == expected.finish_reason
            assert torch.equal(got.routed_experts, expected.routed_experts)
            assert got.logprobs == pytest.approx(expected.logprobs, abs=FP32_ENGINE_GAP)


def test_the_learner_finds_the_same_logprobs(moe):
    cfg, sglang = moe
    plan = resolve_plan(cfg)
    port = free_port()
    learner_cfg = replace(cfg, learner=replace(cfg.learner, device="cpu"))
    worker = LearnerWorker(learner_cfg, plan, 0, 1, "127.0.0.1", port)
    try:
        buckets, version = worker.export()
        load(sglang, buckets, version)
        done = sglang.generate(requests(24, 7))
        groups = [Group(Prompt(i, Example("", "", ""), c.prompt_tokens), (c,), (0.0,)) for i, c in enumerate(done)]
        batch = pack(groups, plan.digest)
        logprob_T, _ = worker.logprobs(batch)
    finally:
        worker.close()
    gap_N = (logprob_T - batch.sampler_logprob_T)[batch.loss_mask_T]
    assert gap_N.numel() > 50 and float(gap_N.abs().max()) < FP32_ENGINE_GAP


def test_fifty_updates_each_proven_each_felt_without_growth(moe):
    cfg, sglang = moe
    asked = requests(8, 3, max_new_tokens=6)
    scheduler = psutil.Process(sglang.states()[0]["minite"]["pid"])
    seen, memory = set(), []
    for step in range(UPDATES):
        assert load(sglang, *shipment(cfg, 100 + step, step=step)) == sglang.weight_version().weight_digest
        seen.add(tuple(p for c in sglang.generate(asked) for p in c.logprobs))
        memory.append(scheduler.memory_info().rss)
    assert sglang.stats().update_seconds.keys() >= {"flatten", "transfer", "load", "verify", "prepare", "flush"}
    assert all(0 <= seconds < 60 for seconds in sglang.stats().update_seconds.values())
    assert len(seen) == UPDATES
    growth = max(memory[2:]) - memory[1]
    print(f"{UPDATES} updates, growth of the scheduler {growth >> 10} KiB")
    assert growth < MAX_GROWTH


def test_the_prefix_cache_holds_nothing_of_old_weights(moe):
    cfg, sglang = moe
    asked = [Request(f"r{i}", tuple(range(2, 18)), SamplingParams(4, seed=i)) for i in range(4)]
    load(sglang, *shipment(cfg, 1))
    first = sglang.generate(asked)
    load(sglang, *shipment(cfg, 2))
    sglang.generate(asked)  # the same prefixes, under other weights
    load(sglang, *shipment(cfg, 1))
    again = sglang.generate(asked)
    assert [c.tokens for c in again] == [c.tokens for c in first]
    for a, b in zip(again, first, strict=True):
        assert a.logprobs == pytest.approx(b.logprobs, abs=1e-6)


def test_a_request_gets_the_same_tokens_in_any_company(moe):
    cfg, sglang = moe
    load(sglang, *shipment(cfg, 4))
    asked = requests(16, 4)
    together = {c.request_id: c.tokens for c in sglang.generate(asked)}
    shuffled = random.Random(0).sample(asked, len(asked))
    assert {c.request_id: c.tokens for c in sglang.generate(shuffled)} == together
    assert sglang.generate([asked[5]])[0].tokens == together[asked[5].request_id]


def test_damage_is_named_nothing_is_sampled_and_the_next_update_mends_it(moe):
    cfg, sglang = moe
    buckets, version = shipment(cfg, 5, step=3)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    damaged = [dict(bucket) for bucket in buckets]
    damaged[0][name] = damaged[0][name] ^ 1
    with pytest.raises(SyncError, match=name.replace(".", r"\.")):
        load(sglang, damaged, version)
    with pytest.raises(SyncError, match="the update to the weights of step 3 failed"):
        sglang.generate(requests(1))
    assert load(sglang, buckets, version) == version.weight_digest
    sglang.generate(requests(2))


def test_an_update_given_up_half_way_can_be_begun_again(moe):
    cfg, sglang = moe
    buckets, version = shipment(cfg, 6, step=4)
    sglang.begin_update(version)
    sglang.load_bucket({name: t for name, t in buckets[0].items() if name != MANIFEST})
    with pytest.raises(SyncError, match="did not finish"):
        sglang.generate(requests(1))
    assert load(sglang, buckets, version) == version.weight_digest
    assert load(sglang, buckets, version) == version.weight_digest  # a version that arrives twice


def test_an_update_that_sglang_refuses_is_told_and_the_next_one_mends_it(moe):
    """SGLang answers {success: false} to tensors outside of a session; here its session ended behind our back."""
    cfg, sglang = moe
    buckets, version = shipment(cfg, 12, step=7)
    sglang.begin_update(version)
    sglang.compat.end_update(sglang.sglang)
    with pytest.raises(SyncError, match="SGLang refused update_weights_from_tensor: .*begin_weight_update"):
        sglang.load_bucket(buckets[0])
    with pytest.raises(SyncError, match="did not finish"):
        sglang.generate(requests(1))
    assert load(sglang, buckets, version) == version.weight_digest


def test_a_converted_checkpoint_is_the_learners_update(moe, tmp_path):
    cfg, sglang = moe
    directory, version = converted(cfg, tmp_path, seed=13)
    assert sglang.update_from_disk(directory) == version.weight_digest
    asked = requests(4, 13)
    assert [c.tokens for c in sglang.generate(asked)] == [c.tokens for c in engine(cfg, 13).generate(asked)]


def test_an_update_arrives_as_slime_sends_it(moe):
    """Flattened into one tensor, for SGLang's own loading of weights: no loader of ours is named."""
    from sglang.srt.utils import MultiprocessingSerializer
    from sglang.srt.weight_sync.tensor_bucket import FlattenedTensorBucket

    cfg, sglang = moe

    def send(tensors):
        bucket = FlattenedTensorBucket(named_tensors=list(flatten(tensors).items()))
        payload = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        with sglang._clock.timed("transfer"):
            answer = sglang.sglang.update_weights_from_tensor(
                [MultiprocessingSerializer.serialize(payload, output_str=True)], "flattened_bucket", False
            )
        assert answer[0], answer[1]

    buckets, version = shipment(cfg, 14, step=8)
    with mock.patch.object(sglang, "_send", send):
        assert load(sglang, buckets, version) == version.weight_digest
    asked = requests(4, 14)
    assert [c.tokens for c in sglang.generate(asked)] == [c.tokens for c in engine(cfg, 14).generate(asked)]


def test_weights_of_another_plan_are_refused_before_they_are_sent(moe):
    cfg, sglang = moe
    buckets, version = shipment(cfg, 0)
    with pytest.raises(SyncError, match="another precision plan"):
        sglang.begin_update(replace(version, plan_digest="0" * 64))
    load(sglang, buckets, version)


def test_a_request_that_can_never_run_is_an_error_and_disturbs_nobody(moe):
    cfg, sglang = moe
    load(sglang, *shipment(cfg, 0))
    for bad in (Request("a", (), SamplingParams(4)), Request("a", (1,), SamplingParams(10_000))):
        with pytest.raises(UserError, match="request 'a'"):
            sglang.generate([bad])
    with pytest.raises(UserError, match="top_k 1 is greedy"):
        sglang.generate([Request("a", (1,), SamplingParams(2, top_k=1))])
    assert len(sglang.generate(requests(3))) == 3


def test_stop_tokens_end_a_response_and_are_part_of_it(moe):
    cfg, sglang = moe
    load(sglang, *shipment(cfg, 8))
    asked = requests(16, 8, max_new_tokens=8, stop_token_ids=tuple(range(0, 40, 3)))
    for got, expected in zip(sglang.generate(asked), engine(cfg, 8).generate(asked), strict=True):
        assert (got.tokens, got.finish_reason) == (expected.tokens, expected.finish_reason)


def test_abort_from_another_thread_keeps_what_there_is(moe):
    cfg, sglang = moe
    load(sglang, *shipment(cfg, 9))
    long = [Request(f"l{i}", (3, 4), SamplingParams(60, seed=i)) for i in range(64)]
    timer = threading.Timer(0.3, sglang.abort)
    timer.start()
    done = sglang.generate(long)
    timer.join()
    reasons = {c.finish_reason for c in done}
    assert "abort" in reasons and all(len(c.tokens) == len(c.logprobs) < 61 for c in done)
    for c in done:
        assert c.routed_experts is None or len(c.routed_experts) == len(c.prompt_tokens) + len(c.tokens) - 1
    assert len(sglang.generate(requests(4))) == 4


def test_codes_are_equal_bit_for_bit_in_every_module(moe):
    """Learner and SGLang, operation by operation: prefills and decode steps, each batched its own way."""
    cfg, sglang = moe
    cfg = replace(cfg, learner=replace(cfg.learner, device="cpu", tokens_per_microbatch=512))
    prompts = tuple(Prompt(i, Example("", "", ""), tuple(range(1 + i, 12 + i))) for i in range(3))
    subject = Subject(cfg, sglang.plan, prompts, 0, lambda worker: None)
    with closing(start_learner(cfg, sglang.plan)) as worker:
        engines = Pair(worker, sglang)
        engines.sync()
        batch, theirs = watch_sampler(engines, subject)
        ours = watch_learner(engines, subject, batch)
    report = compare(ours, theirs, batch.cu_seqlens_S1)
    assert len(report.findings) == 16 * 2 + 2 and batch.num_sequences == 16
    coded = {f.module: f for f in report.findings if f.equal_codes is not None}
    assert len(coded) == len(expected_modules(sglang.plan)) == 8
    assert all(f.equal_codes == f.equal_inputs > 20 for f in coded.values())
    assert not any(text.startswith(("weight", "input")) for f in report.findings for text in f.differs)
    assert {f.tokens for f in coded.values()} == {max(f.tokens for f in report.findings)}
    assert len(sglang.generate(requests(2))) == 2  # as before, outside of the watch
