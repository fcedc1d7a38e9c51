"""Real SGLang on its CPU engine: a dense BF16 model of layers in several precisions, and the ways weights get in."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch.distributed as dist
from real_sglang import NEEDS_SGLANG, sglang_engine
from tiny_engine import DENSE, QUANTIZED, engine, load, requests, shipment

from minite.ports import free_port
from minite.sync.errors import SyncError
from minite.sync.flat import DATA, INDEX, flatten

pytestmark = NEEDS_SGLANG


@pytest.fixture(scope="module")
def dense():
    """A recipe of W4A16, W4A8 and BF16, and its engine. Every test loads the weights it wants."""
    rules = [
        {"match": "model.layers.0.**", "use": "w4a16"},
        {"match": "model.layers.1.mlp.*", "use": "w4a8"},
        {"match": "**", "use": "bf16"},
    ]
    formats = {name: QUANTIZED[name] for name in ("w4a16", "w4a8")}
    cfg, made = sglang_engine(DENSE, "w4a16", rules=rules, formats=formats)
    yield cfg, made
    made.close()


def check_tokens(cfg, sglang, seed: int) -> None:
    """Those of the built-in sampler with the same weights."""
    asked = requests(24, seed)
    pairs = list(zip(sglang.generate(asked), engine(cfg, seed).generate(asked), strict=True))
    assert sum(a.tokens == b.tokens for a, b in pairs) >= 23  # a BF16 rounding may flip, once


def test_layers_of_several_precisions(dense):
    """Which is which is the plan's to say, and the engine's to prove."""
    cfg, sglang = dense
    modules = sglang.states()[0]["minite"]["modules"]
    assert modules["model.layers.0.mlp.gate_up_proj"] == "nvfp4_1d x bf16"
    assert modules["model.layers.1.mlp.gate_up_proj"] == "nvfp4_1d x mxfp8"
    assert modules["model.layers.1.self_attn.qkv_proj"] == "bf16 x bf16"
    load(sglang, *shipment(cfg, 1))
    check_tokens(cfg, sglang, 1)


def test_weights_in_the_models_dtype_are_quantized_to_the_learners_codes(dense):
    cfg, sglang = dense
    plain = replace(cfg, sampler=replace(cfg.sampler, transport="model_dtype"))
    (packed, version), (buckets, plainly) = shipment(cfg, 2), shipment(plain, 2)
    assert plainly == version and not set(packed[0]) <= set(buckets[0])
    assert load(sglang, buckets, version) == version.weight_digest
    check_tokens(cfg, sglang, 2)
    assert load(sglang, packed, version) == version.weight_digest  # the next update may come the other way


def test_a_process_group_brings_weights_too(dense):
    """Rank 0 broadcasts each bucket to the schedulers themselves; the engine's process only says how large it is."""
    from sglang.srt.utils import init_custom_process_group

    cfg, sglang = dense
    buckets, version = shipment(cfg, 15, step=9)
    port = free_port()
    rank_0 = {"init_method": f"tcp://127.0.0.1:{port}", "world_size": 2, "rank": 0, "group_name": "weights"}
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(init_custom_process_group, "gloo", **rank_0)
        sglang.join("weights", "127.0.0.1", port, first_rank=1, world_size=2, backend="gloo")
        group = joined.result()
    damaged = {name: tensor ^ 1 if name.endswith("down_proj.weight") else tensor for name, tensor in buckets[0].items()}
    for sent, wrong in ((damaged, "down_proj.weight: held bytes differ"), (buckets[0], None)):
        sglang.begin_update(version)
        for bucket in (sent, *buckets[1:]):
            flat = flatten(bucket)
            under_way = [dist.broadcast(flat[part], 0, group, async_op=True) for part in (DATA, INDEX)]
            sglang.load_broadcast("weights", (len(flat[DATA]), len(flat[INDEX])))
            for work in under_way:
                work.wait()
        if wrong:
            with pytest.raises(SyncError, match=wrong):
                sglang.finish_update()
    assert sglang.finish_update() == version.weight_digest
    check_tokens(cfg, sglang, 15)


def test_half_of_an_update_is_no_update(dense):
    """The manifest came, a bucket before it did not."""
    cfg, sglang = dense
    buckets, version = shipment(cfg, 16)
    names = list(buckets[0])
    with pytest.raises(SyncError, match=r"missing from the weight update \(7 of"):
        load(sglang, [{name: buckets[0][name] for name in names[7:]}, *buckets[1:]], version)
    with pytest.raises(SyncError, match="refusing to generate"):
        sglang.generate(requests(1))
    with pytest.raises(SyncError, match=f"{names[0].partition('|')[0]}: arrived twice"):
        load(sglang, [buckets[0], *buckets], version)
    assert load(sglang, buckets, version) == version.weight_digest
