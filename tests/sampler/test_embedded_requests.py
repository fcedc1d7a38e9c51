"""Life of a request: stops, limits, capacity, aborts, errors, statistics."""

import threading
from dataclasses import replace

import pytest
from tiny_engine import DENSE, MOE, config, engine, requests

from minite.errors import UserError
from minite.sampler.engine import Request, SamplingParams


@pytest.fixture(scope="module")
def dense():
    return engine(config(DENSE))


def test_max_new_tokens_and_stop_tokens(dense):
    free = dense.generate(requests(8, seed=1, max_new_tokens=8))
    assert all(len(c.tokens) == len(c.logprobs) == 8 and c.finish_reason == "length" for c in free)
    for c, r in zip(free, requests(8, seed=1, max_new_tokens=8), strict=True):
        stop = c.tokens[3]
        stopped = dense.generate([replace(r, params=replace(r.params, stop_token_ids=(99, stop)))])[0]
        assert stopped.finish_reason == "stop"
        assert stopped.tokens == c.tokens[: c.tokens.index(stop) + 1]  # the stop token is part of the response


def test_completions_come_in_request_order_with_experts_of_every_token_but_the_last():
    wanted = requests(10, seed=2)
    done = engine(config(MOE)).generate(wanted)
    assert [c.request_id for c in done] == [r.request_id for r in wanted]
    for c, r in zip(done, wanted, strict=True):
        assert c.prompt_tokens == r.prompt_tokens
        assert c.routed_experts.shape == (len(r.prompt_tokens) + len(c.tokens) - 1, 2, 2)
        assert 0 <= int(c.routed_experts.min()) <= int(c.routed_experts.max()) < 4
        assert (c.routed_experts[..., 0] != c.routed_experts[..., 1]).all()


def test_dense_models_have_no_experts(dense):
    assert dense.generate(requests(1))[0].routed_experts is None


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (Request("a", (), SamplingParams(1)), "'a': empty prompt"),
        (Request("a", (1, 40), SamplingParams(1)), r"outside the vocabulary, 0\.\.39"),
        (Request("a", (-1,), SamplingParams(1)), "outside the vocabulary"),
        (Request("a", (1,), SamplingParams(0)), "max_new_tokens is 0"),
        (Request("a", (1,) * 60, SamplingParams(5)), "prompt 60 .* 5 is more than model.max_seq_len 64"),
        (Request("a", (1,), SamplingParams(1, temperature=-1.0)), "temperature -1.0"),
        (Request("a", (1,), SamplingParams(1, top_p=0.0)), "top_p 0.0"),
        (Request("a", (1,), SamplingParams(1, top_k=-1)), "top_k -1"),
    ],
)
def test_impossible_requests_are_refused_before_anything_runs(dense, request_, text):
    before = dense.stats().prefill_tokens
    with pytest.raises(UserError, match=text):
        dense.generate([*requests(2), request_])
    assert dense.stats().prefill_tokens == before and dense.stats().running == 0
    assert dense.generate(requests(2))  # and the engine goes on


def test_ids_must_be_unique(dense):
    with pytest.raises(UserError, match="'r0.0': this id is already live"):
        dense.generate(requests(1) * 2)


def test_a_request_that_can_never_fit_the_cache():
    small = engine(config(DENSE, sampler={"kv_tokens": 20}))
    with pytest.raises(UserError, match="prompt 15 .* 6 can never fit sampler.kv_tokens 20"):
        small.generate([Request("a", (1,) * 15, SamplingParams(6))])
    assert small.generate([Request("a", (1,) * 15, SamplingParams(5))])[0].finish_reason == "length"


def test_capacity_is_respected_at_every_step():
    seen = []
    e = engine(config(DENSE, sampler={"kv_tokens": 50, "max_batch": 4}), progress=lambda s: seen.append(replace(s)))
    done = e.generate(requests(30, seed=3))
    assert len(done) == 30 and max(s.running for s in seen) >= 2
    assert all(s.running <= 4 and s.kv_tokens_used <= 50 for s in seen)
    stats = e.stats()
    assert stats.requests == 30 and stats.running == stats.kv_tokens_used == 0
    assert stats.generated_tokens == sum(len(c.tokens) for c in done)


def test_abort_ends_running_and_waiting_requests():
    counts = []

    def stop(stats):
        if stats.decode_steps == 2 and not counts:
            counts.append(e.abort(["r0.0", "r0.5", "unknown"]))

    e = engine(config(DENSE, sampler={"max_batch": 4}))
    wanted = requests(6, max_new_tokens=8)
    whole = e.generate(wanted)
    e = engine(config(DENSE, sampler={"max_batch": 4}), progress=stop)
    done = e.generate(wanted)
    assert counts == [2] and e.stats().aborted == 2
    assert done[0].finish_reason == "abort" and done[0].tokens == whole[0].tokens[:3]  # kept what it had
    assert done[5].finish_reason == "abort" and done[5].tokens == []
    assert [c.tokens for c in done[1:5]] == [c.tokens for c in whole[1:5]]
    assert e.stats().kv_tokens_used == 0


def test_abort_all_from_another_thread():
    started = threading.Event()
    e = engine(config(DENSE), progress=lambda stats: started.set())
    result = []
    thread = threading.Thread(target=lambda: result.extend(e.generate(requests(200, max_new_tokens=40, longest=20))))
    thread.start()
    assert started.wait(30)
    with pytest.raises(UserError, match="generate is already running"):
        e.generate(requests(1, seed=1))
    assert e.abort() == 200
    thread.join(30)
    assert not thread.is_alive() and len(result) == 200
    assert {c.finish_reason for c in result} == {"abort"}
    assert e.abort() == 0


def test_an_exception_in_the_middle_leaves_the_engine_clean():
    def fail(stats):
        raise RuntimeError("stop here")

    e = engine(config(DENSE), progress=fail)
    with pytest.raises(RuntimeError, match="stop here"):
        e.generate(requests(3, max_new_tokens=8))
    e.progress = None
    assert e.stats().running == e.stats().kv_tokens_used == 0
    assert len(e.generate(requests(3))) == 3


def test_no_requests(dense):
    assert dense.generate([]) == []
