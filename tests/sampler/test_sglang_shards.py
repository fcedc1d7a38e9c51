"""Two ranks of an engine in two threads: each holds its part, together they hold what one rank holds."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import pytest
import torch
from plain_model import build, send
from test_sglang_inside import judge, opening
from tiny_engine import DENSE, MOE, config, random_weights, shipment

from minite.config import resolve_plan
from minite.errors import UserError
from minite.models import get_model
from minite.sampler.sglang import proof, shards
from minite.sampler.sglang.ranks import Ranks
from minite.sync.errors import SyncError
from minite.sync.flat import text
from minite.sync.transport import MANIFEST, UNQUANTIZED


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """Ranks that meet in memory."""

    said: list = field(default_factory=list)
    barrier: threading.Barrier = field(default_factory=lambda: threading.Barrier(2))

    def everyones(self, value):
        self.said[self.rank] = value
        self.barrier.wait(60)
        values = list(self.said)
        self.barrier.wait(60)
        return values

    def parts(self, tensor):
        return self.everyones(tensor.clone())


def two(cfg):
    shared = ThreadRanks(0, 2, said=[None, None])
    return [build(cfg, replace(shared, rank=rank)) for rank in range(2)]


def update(pair, *messages):
    """``messages[rank]``: what a rank receives."""
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda rank: send(*pair[rank], *messages[rank]), range(2)))


def states(pair):
    return [{"minite": {**state.proof(), "missing_hooks": []}} for state, _ in pair]


@pytest.mark.parametrize(("model", "fmt"), [(MOE, "w4a4"), (MOE, "w4a4_2d"), (DENSE, "w8a8"), (DENSE, "w4a16")])
def test_both_hold_their_part_and_the_digest_is_that_of_one(model, fmt):
    cfg = config(model, fmt)
    pair, (buckets, version) = two(cfg), shipment(cfg)
    messages = [opening(version), *buckets]
    update(pair, messages, messages)
    first = pair[0][0]
    proof.check(states(pair), first.plan, first.backend.name, version)
    sent = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    codes = sent["model.layers.0.self_attn.o_proj.weight"]
    halves = [state.weights.views["model.layers.0.self_attn.o_proj.weight"] for state, _ in pair]
    assert halves[0].shape[1] == codes.shape[1] // 2 and torch.equal(torch.cat(halves, 1), codes)
    words = [state.weights.views["model.embed_tokens.weight"] for state, _ in pair]
    assert [len(part) for part in words] == [32, 8]


def test_damage_on_one_rank_is_every_ranks_fault():
    cfg = config(MOE, "w4a4")
    pair, (buckets, version) = two(cfg), shipment(cfg)
    name = "model.layers.1.mlp.experts.2.down_proj.weight"
    damaged = [{k: v ^ 1 if k == name else v for k, v in bucket.items()} for bucket in buckets]
    update(pair, [opening(version), *buckets], [opening(version), *damaged])
    for state, _ in pair:
        assert state.proof()["weight_digest"] is None and name in state.proof()["fault"]
    lost = [bucket for bucket in buckets if MANIFEST in bucket]
    update(pair, [opening(version), *buckets], [opening(version), *lost])
    for state, _ in pair:
        assert state.proof()["weight_digest"] is None
    update(pair, *[[opening(version), *buckets]] * 2)
    proof.check(states(pair), pair[0][0].plan, pair[0][0].backend.name, version)


def test_a_tensor_that_is_whole_everywhere_must_be_the_same_everywhere():
    cfg = config(MOE, "w4a4")
    pair, (buckets, version) = two(cfg), shipment(cfg)
    name = "model.norm.weight"
    damaged = [{k: v + 1 if k == name else v for k, v in bucket.items()} for bucket in buckets]
    update(pair, [opening(version), *buckets], [opening(version), *damaged])
    assert all(f"{name}: rank 1 of the engine holds other bytes" in state.proof()["fault"] for state, _ in pair)


@pytest.mark.parametrize("fmt", ["w4a4", "w4a16"])
def test_weights_in_the_models_dtype_become_the_learners_codes(fmt):
    cfg = config(MOE, fmt)
    buckets, version = shipment(cfg, 3)
    plain = random_weights(cfg, 3)
    assert plain.keys() == get_model(cfg.model.kind).hf_tensors(cfg.model).keys()
    state, model = build(cfg)
    start, marked = opening(version), {**plain, UNQUANTIZED: text("")}
    send(state, model, start, marked, {MANIFEST: buckets[-1][MANIFEST]})
    judge(state, version)
    pair = two(cfg)
    update(pair, *[[start, marked, {MANIFEST: buckets[-1][MANIFEST]}]] * 2)
    proof.check(states(pair), pair[0][0].plan, pair[0][0].backend.name, version)
    changed = {name: tensor * 1.01 if name.endswith("o_proj.weight") else tensor for name, tensor in marked.items()}
    send(state, model, start, changed, {MANIFEST: buckets[-1][MANIFEST]})
    with pytest.raises(SyncError, match="o_proj"):
        judge(state, version)


def test_a_cut_through_a_block_or_a_head_is_refused():
    cfg = config(MOE, "w4a4")
    plan = resolve_plan(cfg)
    shards.check(plan, cfg.model, 2)
    with pytest.raises(UserError, match="does not divide model.num_kv_heads 2"):
        shards.check(plan, cfg.model, 4)
    narrow = config({**MOE, "moe_intermediate_size": 16}, "bf16")
    shards.check(resolve_plan(narrow), narrow.model, 2)
