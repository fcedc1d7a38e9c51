"""What a scheduler process does with a weight update, and what it proves, without SGLang around it."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from plain_model import PADDING, build, send
from tiny_engine import DENSE, MOE, config, engine, random_weights, shipment

from minite.backends.registry import get_backend
from minite.models.hf_config import write_hf_config
from minite.sampler.sglang import proof
from minite.sampler.sglang.wire import DISK, VERSION
from minite.sync import disk
from minite.sync.checkpoint import CheckpointWriter
from minite.sync.convert import convert
from minite.sync.errors import SyncError
from minite.sync.flat import text
from minite.sync.transport import MANIFEST
from minite.types import WeightVersion

LAYERS = "model.layers"


def opening(version: WeightVersion) -> dict:
    return {VERSION: text(json.dumps(asdict(version)))}


def updated(cfg, seed: int = 0):
    state, model = build(cfg)
    buckets, version = shipment(cfg, seed)
    send(state, model, opening(version), *buckets)
    return state, model, buckets, version


def judge(state, version):
    proof.check([{"minite": {**state.proof(), "missing_hooks": []}}], state.plan, state.backend.name, version)


@pytest.mark.parametrize(("model", "fmt"), [(MOE, "w4a4"), (MOE, "w4a8"), (MOE, "bf16"), (DENSE, "w4a16")])
def test_a_whole_update_is_proven(model, fmt):
    state, _, _, version = updated(config(model, fmt))
    assert state.proof()["weight_digest"] == version.weight_digest and state.proof()["updates"] == 1
    judge(state, version)


def test_sglangs_own_parameters_are_written_up_to_the_padding_of_the_vocabulary():
    state, model, buckets, _ = updated(config(MOE, "w4a4"))
    sent = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    embedding = model.held["model.embed_tokens.weight"]
    assert torch.equal(embedding[:-PADDING], sent["model.embed_tokens.weight"])
    assert bool((embedding[-PADDING:] == 7).all())


def test_new_weights_are_computed_with_in_the_memory_of_the_old():
    cfg = config(MOE, "w4a4")
    state, model, _, _ = updated(cfg, seed=0)
    before = [linear.prepared for linear in state.weights.linears]
    buckets, version = shipment(cfg, seed=1, step=1)
    send(state, model, opening(version), *buckets)
    judge(state, version)
    fresh = engine(cfg, seed=1).model.weights.linears
    by_name = {linear.entry.name: linear for linear in fresh}
    x = torch.randn(5, 64).bfloat16()
    for linear, old in zip(state.weights.linears, before, strict=True):
        assert linear.prepared is old
        if not linear.grouped:
            a = state.backend.quantize(x, linear.input_operand)
            expected = state.backend.gemm(a, by_name[linear.entry.name].prepared, torch.bfloat16)
            assert torch.equal(state.backend.gemm(a, linear.prepared, torch.bfloat16), expected)


def drop(named, name):
    return {k: v for k, v in named.items() if not k.startswith(name)}


def flip(named, name):
    changed = {k: v.clone() for k, v in named.items()}
    next(v for k, v in changed.items() if k.startswith(name)).view(torch.uint8).flatten()[3] ^= 1
    return changed


@pytest.mark.parametrize("damage", [drop, flip])
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.1.mlp.experts.2.up_proj.weight",
        "model.layers.0.self_attn.k_proj.weight_scale",
        "model.norm.weight",
    ],
)
def test_damage_on_the_way_is_named_and_refused(damage, name):
    cfg = config(MOE, "w4a4")
    state, model = build(cfg)
    buckets, version = shipment(cfg)
    send(state, model, opening(version), *[damage(b, name) if MANIFEST not in b else b for b in buckets])
    assert state.proof()["weight_digest"] is None
    with pytest.raises(SyncError, match=name.replace(".", r"\.")):
        judge(state, version)
    send(state, model, opening(version), *buckets)  # a later update mends it
    judge(state, version)


def test_a_tensor_that_arrives_twice_is_named():
    cfg = config(MOE, "w4a4")
    state, model = build(cfg)
    buckets, version = shipment(cfg)
    send(state, model, opening(version), buckets[0], *buckets)
    with pytest.raises(SyncError, match="arrived twice"):
        judge(state, version)


def test_a_version_that_arrives_twice_is_loaded_twice_and_proven():
    state, model, buckets, version = updated(config(MOE, "w4a4"))
    send(state, model, opening(version), *buckets)
    judge(state, version)
    assert state.updates == 2


def converted(cfg, folder, seed: int = 0):
    """(a directory of `minite convert` with the weights of ``shipment``, their version)."""
    with CheckpointWriter(folder / "hf") as writer:
        for name, tensor in random_weights(cfg, seed).items():
            writer.add(name, tensor)
        writer.write_json("config.json", write_hf_config(cfg.model))
    convert(folder / "hf", folder / "nvfp4", cfg, get_backend("reference", device="cpu", strict=False))
    return folder / "nvfp4", shipment(cfg, seed)[1]


def test_a_converted_checkpoint_is_the_learners_update(tmp_path):
    cfg = config(MOE, "w4a4")
    directory, version = converted(cfg, tmp_path)
    assert disk.announced(directory) == version
    state, model = build(cfg)
    send(state, model, opening(version), {DISK: text(str(directory))})
    judge(state, version)


def test_a_damaged_checkpoint_is_refused_by_the_name_of_the_tensor(tmp_path):
    cfg = config(MOE, "w4a4")
    directory, version = converted(cfg, tmp_path)
    file = next(directory.glob("*-00001*.safetensors"))
    raw = bytearray(file.read_bytes())
    raw[-1] ^= 1
    file.write_bytes(raw)
    state, model = build(cfg)
    send(state, model, opening(version), {DISK: text(str(directory))})
    with pytest.raises(SyncError, match="not those announced"):
        judge(state, version)
    send(state, model, opening(version), {DISK: text(str(tmp_path))})
    with pytest.raises(SyncError, match="has no minite_digest"):
        judge(state, version)


def test_fifty_updates_each_proven_in_the_same_memory():
    cfg = config(DENSE, "w4a4")
    state, model = build(cfg)
    seen, places = set(), set()
    for step in range(50):
        buckets, version = shipment(cfg, step, step)
        send(state, model, opening(version), *buckets)
        judge(state, version)
        seen.add(version.weight_digest)
        places.add(tuple(view.data_ptr() for view in state.weights.views.values()))
    assert len(seen) == 50 and len(places) == 1 and state.updates == 50


def test_half_an_update_proves_nothing():
    cfg = config(MOE, "w4a4")
    state, model = build(cfg)
    buckets, version = shipment(cfg)
    send(state, model, opening(version), *buckets[:-1])
    with pytest.raises(SyncError, match="weight digest is None, expected"):
        judge(state, version)


def test_tensors_without_an_opening_are_refused():
    cfg = config(MOE, "w4a4")
    state, model, buckets, version = updated(cfg)
    send(state, model, buckets[0])
    with pytest.raises(SyncError, match="outside of a weight update"):
        judge(state, version)


def test_weights_of_another_plan_are_refused():
    state, model, buckets, version = updated(config(MOE, "w4a4"))
    other = replace(version, plan_digest="0" * 64)
    send(state, model, opening(other), *buckets)
    with pytest.raises(SyncError, match="were made under plan 0000"):
        judge(state, version)


def test_an_older_version_than_announced_is_refused():
    state, _, _, version = updated(config(MOE, "w4a4"))
    with pytest.raises(SyncError, match="step of the weights is 0, expected 5"):
        judge(state, replace(version, step=5))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.pop("minite"), "plugin is not active"),
        (lambda s: s["minite"].update(plan_digest="f" * 64), "plan digest is ffff"),
        (lambda s: s["minite"].update(missing_hooks=["a.b"]), "could not apply is .*a.b"),
        (lambda s: s["minite"].update(backend="reference"), "backend is reference, expected native"),
        (
            lambda s: s["minite"]["modules"].pop("model.layers.1.self_attn.o_proj"),
            r"layers\.1\.self_attn\.o_proj runs out",
        ),
        (
            lambda s: s["minite"]["modules"].update({f"{LAYERS}.0.self_attn.qkv_proj": "nvfp4_1d x bf16"}),
            r"layers\.0\.self_attn\.qkv_proj runs nvfp4_1d x bf16, the plan says nvfp4_1d x nvfp4_row",
        ),
    ],
)
def test_a_scheduler_that_runs_something_else_is_named(change, message):
    state, _, _, version = updated(config(MOE, "w4a4"))
    shown = {**state.proof(), "missing_hooks": [], "backend": "native"}
    good, also_good, bad = ({"minite": {**shown, "rank": [r, 2], "modules": dict(state.modules)}} for r in (0, 1, 1))
    proof.check([good, also_good], state.plan, "native", version)
    with pytest.raises(SyncError, match=r"scheduler 0: rank is \[0, 2\], expected \[0, 1\]"):
        proof.check([good], state.plan, "native", version)
    change(bad)
    with pytest.raises(SyncError, match=f"SGLang scheduler 1: .*{message}"):
        proof.check([good, bad], state.plan, "native", version)


def test_no_answer_is_no_proof():
    state, _, _, version = updated(config(MOE, "w4a4"))
    with pytest.raises(SyncError, match="no SGLang scheduler answered"):
        proof.check([], state.plan, state.backend.name, version)
