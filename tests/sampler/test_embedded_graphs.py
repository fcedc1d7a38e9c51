"""CUDA graphs of the built-in engine: the bits of steps without them, in any batch, after a weight update too."""

from __future__ import annotations

import pytest
import torch
from tiny_engine import DENSE, LLAMA, MOE, config, load, requests, shipment

from minite.backends.cutlass.weights import NativeWeight
from minite.backends.refresh import addresses, refreshed
from minite.backends.registry import get_backend
from minite.config import resolve_plan
from minite.formats import nvfp4
from minite.sampler.embedded import EmbeddedEngine
from minite.sampler.embedded.graphs import sizes


@pytest.mark.parametrize("most", [1, 5, 64, 256, 300])
def test_a_batch_of_any_size_has_a_graph_that_is_not_much_larger(most):
    ladder = sizes(most)
    assert ladder == sorted(set(ladder)) and ladder[-1] == most
    for batch in range(1, most + 1):
        size = next(s for s in ladder if s >= batch)
        assert size <= max(2 * batch, 8) if batch < 16 else size * 2 <= batch * 3


def test_weights_are_refreshed_where_they_lie():
    backend = get_backend("reference", device="cpu", strict=False)
    old, new, wider = (
        backend.prepare(nvfp4.quantize(torch.randn(32, k, generator=torch.Generator().manual_seed(i)).bfloat16()))
        for i, k in enumerate((64, 64, 128))
    )
    before, values = addresses(old), new.values.clone()
    assert refreshed(old, new) is old and addresses(old) == before
    assert old.values.equal(values) and old.amax.equal(new.amax)
    assert refreshed(old, wider) is wider and refreshed(None, old) is old and refreshed(torch.ones(3), old) is old


def test_what_was_made_of_the_weights_is_refreshed_too():
    emulation = get_backend("reference", device="cpu", strict=False)
    first, second = (torch.randn(32, 64, generator=torch.Generator().manual_seed(i)).bfloat16() for i in (0, 1))
    old, new = (NativeWeight.of(nvfp4.quantize(weight), emulation) for weight in (first, second))
    at = addresses(old.emulated)
    assert refreshed(old, new) is old and addresses(old.emulated) == at
    assert old.emulated.values.equal(NativeWeight.of(nvfp4.quantize(second), emulation).emulated.values)


def test_a_cpu_says_why_it_has_no_graphs():
    cfg = config(MOE, "w4a4")
    engine = EmbeddedEngine(cfg, resolve_plan(cfg), "cpu")
    assert engine.graphs is None and "CUDA" in engine.model.step_by_step()


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache", ["bf16", "fp8"])
@pytest.mark.parametrize("fmt", ["bf16", "w4a4", "w4a16"])
@pytest.mark.parametrize("model", [MOE, DENSE, LLAMA], ids=["moe", "dense", "llama"])
def test_graphs_give_the_bits_of_single_launches(model, fmt, kv_cache):
    cfg = config(model, fmt, alignment="off", kv_cache=kv_cache, sampler={"max_batch": 24})
    plain, graphed = (EmbeddedEngine(cfg, resolve_plan(cfg), "cuda") for _ in range(2))
    assert graphed.graphs is not None
    plain.graphs = None
    for seed in range(2):  # the second weights go where the graphs read the first
        for engine in (plain, graphed):
            load(engine, *shipment(cfg, seed, seed))
        for wanted, got in zip(*(e.generate(requests(40, seed=seed)) for e in (plain, graphed)), strict=True):
            assert (got.tokens, got.logprobs) == (wanted.tokens, wanted.logprobs)
            assert wanted.routed_experts is None or torch.equal(got.routed_experts, wanted.routed_experts)
        if seed == 0:
            first = dict(graphed.graphs.held)
    assert first and all(graphed.graphs.held[size] is captured for size, captured in first.items())
    assert graphed.graphs.bytes > 0


@pytest.mark.gpu
def test_what_cannot_be_captured_runs_step_by_step():
    for change in ({"alignment": "strict"}, {"dtype": "fp32"}):
        cfg = config(MOE, "bf16", **change)
        engine = EmbeddedEngine(cfg, resolve_plan(cfg), "cuda")
        assert engine.graphs is None and engine.model.step_by_step()
        load(engine, *shipment(cfg))
        assert engine.generate(requests(3))
    cfg = config(MOE, "w4a4_tensor", alignment="off")  # one scale for a whole batch: padding would change it
    assert EmbeddedEngine(cfg, resolve_plan(cfg), "cuda").graphs is None
