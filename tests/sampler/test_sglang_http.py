"""Real SGLang behind its HTTP server, on its CPU engine, against the built-in sampler: as test_sglang_engine.py has it
without the server. One server for the whole file; the last test kills it."""

from __future__ import annotations

import http.client
import threading
from contextlib import closing

import psutil
import pytest
import torch
from real_sglang import NEEDS_SGLANG, sglang_engine
from tiny_engine import MOE, engine, load, requests, shipment

from minite.errors import ProcessDied, UserError
from minite.ports import LOOPBACK
from minite.sampler.engine import Request, SamplingParams
from minite.sync.errors import SyncError
from minite.sync.transport import MANIFEST
from tests.tolerances import FP32_ENGINE_GAP

pytestmark = NEEDS_SGLANG


@pytest.fixture(scope="module")
def served():
    """A recipe and its engine, whose SGLang is a server. Every test loads the weights it wants."""
    cfg, made = sglang_engine(MOE, "w4a4", dtype="fp32", server=True)
    yield cfg, made
    made.close()


def status(port: int, path: str, **headers: str) -> int:
    with closing(http.client.HTTPConnection(LOOPBACK, port, timeout=60)) as connection:
        connection.request("POST", path, b"{}", headers)
        return connection.getresponse().status


def test_each_update_is_proven_and_felt_and_gives_the_built_in_samplers_numbers(served):
    """Which test_sglang_engine.py shows of sglang.Engine from the same seeds."""
    cfg, sglang = served
    with pytest.raises(SyncError, match="refusing to generate: no weights were loaded yet"):
        sglang.generate(requests(1))
    for seed in range(2):
        buckets, version = shipment(cfg, seed, step=seed)
        assert load(sglang, buckets, version) == version.weight_digest
        (state,) = sglang.states()
        assert (state["minite"]["weight_digest"], state["minite"]["step"]) == (version.weight_digest, seed)
        asked = [*requests(20, seed), *requests(4, seed + 50, temperature=0.0), *requests(4, 9, top_k=5, top_p=0.8)]
        for got, expected in zip(sglang.generate(asked), engine(cfg, seed).generate(asked), strict=True):
            assert got.tokens == expected.tokens and got.finish_reason == expected.finish_reason
            assert torch.equal(got.routed_experts, expected.routed_experts)
            assert got.logprobs == pytest.approx(expected.logprobs, abs=FP32_ENGINE_GAP)
            assert got.weight_version == version


def test_abort_from_another_thread_keeps_what_there_is(served):
    cfg, sglang = served
    load(sglang, *shipment(cfg, 9))
    long = [Request(f"l{i}", (3, 4), SamplingParams(60, seed=i)) for i in range(64)]
    timer = threading.Timer(0.3, sglang.abort)
    timer.start()
    done = sglang.generate(long)
    timer.join()
    assert "abort" in {c.finish_reason for c in done} and all(len(c.tokens) == len(c.logprobs) < 61 for c in done)
    assert len(sglang.generate(requests(4))) == 4


def test_a_request_that_sglang_refuses_is_one_line(served):
    cfg, sglang = served
    load(sglang, *shipment(cfg, 3))
    with pytest.raises(UserError, match=r"refused to generate \(status 400\): .*temperature"):
        sglang.sglang.generate(input_ids=[[1]], sampling_params=[{"temperature": -1.0}])
    assert len(sglang.generate(requests(2))) == 2


def test_an_update_that_sglang_refuses_is_told_and_the_next_one_mends_it(served):
    cfg, sglang = served
    if not sglang.compat.sessions:
        pytest.skip("SGLang knows updates, and what is outside of one, from 0.5.18 on")
    buckets, version = shipment(cfg, 4, step=7)
    sglang.begin_update(version)
    sglang.compat.end_update(sglang.sglang)  # behind our back
    with pytest.raises(SyncError, match="SGLang refused update_weights_from_tensor: .*begin_weight_update"):
        sglang.load_bucket(buckets[0])
    with pytest.raises(SyncError, match="did not finish"):
        sglang.generate(requests(1))
    assert load(sglang, buckets, version) == version.weight_digest


def test_it_listens_on_loopback_and_answers_nobody_else_and_nothing_else(served):
    _, sglang = served
    client = sglang.sglang
    root = psutil.Process(client._process.pid)
    http_sockets = [s for s in root.net_connections("tcp") if s.status == psutil.CONN_LISTEN]
    assert (LOOPBACK, client._port) in {s.laddr for s in http_sockets}
    assert {s.laddr.ip for s in http_sockets} == {LOOPBACK}
    key = {"Authorization": f"Bearer {client._key}"}
    for path in ("/generate", "/update_weights_from_tensor", "/flush_cache"):
        assert status(client._port, path) == 401 == status(client._port, path, Authorization="Bearer guess")
    for path in ("/update_weights_from_disk", "/release_memory_occupation", "/health", "/v1/completions", "/docs"):
        assert status(client._port, path, **key) == 404
    for process in [root, *root.children(recursive=True)]:
        assert client._key not in " ".join(process.cmdline()) and client._key not in process.environ().values()


def test_an_update_cut_in_half_by_the_servers_death_leaves_generate_refused_and_no_process(served):
    cfg, sglang = served
    buckets, version = shipment(cfg, 5, step=9)
    root = psutil.Process(sglang.sglang._process.pid)
    below = root.children(recursive=True)
    sglang.begin_update(version)
    sglang.load_bucket({name: t for name, t in buckets[0].items() if name != MANIFEST})
    root.kill()
    with pytest.raises(ProcessDied, match=r"SGLang's server died \(exit code -9\), noticed at "):
        load(sglang, buckets, version)
    with pytest.raises(SyncError, match="refusing to generate: the update to step 9 .* did not finish"):
        sglang.generate(requests(1))
    _, alive = psutil.wait_procs(below, timeout=60)
    assert len(below) >= 2 and not alive
    sglang.close()
