"""Weight updates of the built-in engine: every fault is refused, names its tensor, and stops generation."""

import pytest
import torch
from tiny_engine import DENSE, MOE, config, engine, load, requests, shipment

from minite.config import resolve_plan
from minite.config.operands import OPERANDS
from minite.config.plan import PlanEntry
from minite.formats import quantize_operand
from minite.sampler.embedded import EmbeddedEngine
from minite.sampler.embedded.weights import Linear
from minite.sync.errors import SyncError
from minite.sync.stored import to_parts
from minite.sync.transport import MANIFEST, from_wire, package
from minite.sync.verify import compare

SCALE = "model.layers.1.mlp.experts.2.up_proj.weight_scale"


def fresh(cfg) -> EmbeddedEngine:
    return EmbeddedEngine(cfg, resolve_plan(cfg), "cpu")


def wire_name(name: str) -> str:
    return f"{name}|float8_e4m3fn" if name.endswith("scale") else name


def edit(buckets, change):
    """Copies of the buckets after ``change(bucket)`` has been applied to each."""
    copies = [{k: v.clone() for k, v in b.items()} for b in buckets]
    for bucket in copies:
        change(bucket)
    return copies


def refused(e: EmbeddedEngine, text: str) -> None:
    assert e.weight_version() is None
    with pytest.raises(SyncError, match="refusing to generate") as error:
        e.generate(requests(1))
    assert text in str(error.value)


@pytest.mark.parametrize("fmt", ["bf16", "w4a4", "w4a4_2d", "w8a8"])
@pytest.mark.parametrize("model", [MOE, DENSE], ids=["moe", "dense"])
def test_held_bytes_are_those_sent(model, fmt):
    cfg = config(model, fmt)
    e, (buckets, version) = fresh(cfg), shipment(cfg)
    refused(e, "no weights were loaded yet")
    assert load(e, buckets, version) == version.weight_digest
    assert e.weight_version() == version
    sent = {k: v for b in buckets for k, v in from_wire(b).items() if k != MANIFEST}
    assert e.model.weights.views.keys() == e.model.weights.stored.keys()
    assert compare(sent, e.model.weights.views) is None
    assert e.generate(requests(2))[0].weight_version == version


@pytest.mark.parametrize("operand", [name for name, o in OPERANDS.items() if "weight" in o.roles and o.module])
def test_fused_members_lie_where_the_fused_matrix_has_them(operand):
    """Also where a scale covers 128 rows: members of 128 and 256 rows begin at its rows 0 and 1."""
    members = [
        PlanEntry(f"m.{name}_proj", n, 256, "f", operand, "bf16", "bf16", "bf16", "m.gate_up", "rule")
        for name, n in (("gate", 128), ("up", 256))
    ]
    fused_NK = torch.randn(384, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    fused_NK[100, 7] = 40
    whole = quantize_operand(fused_NK, operand)
    linear = Linear([members], grouped=False, dtype=torch.bfloat16, device=torch.device("cpu"))
    for entry, part_NK in zip(members, fused_NK.split([128, 256]), strict=True):
        for suffix, tensor in to_parts(quantize_operand(part_NK, operand, amax=whole.amax)).items():
            linear.views[f"{entry.name}.{suffix}"].copy_(tensor)
    held = {suffix: b[0, 0] if suffix == "weight_amax" else b[0] for suffix, b in linear.buffers.items()}
    assert compare(held, to_parts(whole)) is None


def test_missing_tensor():
    cfg = config(MOE, "w4a4")
    e, (buckets, version) = engine(cfg), shipment(cfg)
    with pytest.raises(SyncError, match=rf"^{SCALE}: missing from the weight update \(1 of"):
        load(e, edit(buckets, lambda b: b.pop(wire_name(SCALE), None)), version)
    refused(e, f"{SCALE}: missing")
    load(e, buckets, version)  # and the next good update mends it
    assert e.generate(requests(1))


def test_flipped_byte_is_blamed_on_its_tensor():
    cfg = config(MOE, "w4a4")
    e, (buckets, version) = engine(cfg), shipment(cfg)

    def flip(bucket):
        if wire_name(SCALE) in bucket:
            bucket[wire_name(SCALE)][3, 1] ^= 4

    with pytest.raises(SyncError, match=f"^{SCALE}: held bytes differ from those sent") as error:
        load(e, edit(buckets, flip), version)
    assert version.weight_digest in str(error.value)
    refused(e, version.weight_digest)


def test_a_manifest_that_lies_is_not_believed():
    cfg = config(MOE, "w4a4")
    e, (_, version), (others, _) = engine(cfg), shipment(cfg), shipment(cfg, seed=1)
    with pytest.raises(SyncError, match="^unknown tensor: the weights held are not those announced"):
        load(e, others, version)  # consistent in itself, but not what was announced
    refused(e, version.weight_digest)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda b: b.update({"extra.weight": torch.zeros(1)}), "extra.weight: not a tensor of this model and plan"),
        (lambda b: b.update({"model.norm.weight": torch.zeros(3)}), r"norm.weight: got float32 \[3\], expected bf"),
        (lambda b: b.update({SCALE: torch.zeros(32, 4)}), f"{SCALE}: arrived twice|{SCALE}: got float32"),
    ],
)
def test_tensors_that_do_not_belong(change, text):
    cfg = config(MOE, "w4a4")
    e, (buckets, version) = engine(cfg), shipment(cfg)
    with pytest.raises(SyncError, match=text.replace("expected bf", "expected bfloat16")):
        load(e, edit(buckets, change), version)
    refused(e, "did not finish")


def test_a_bucket_that_arrives_twice_in_one_update():
    cfg = config(DENSE)
    e, (buckets, version) = engine(cfg), shipment(cfg)
    with pytest.raises(SyncError, match="arrived twice in one weight update"):
        load(e, [*buckets, buckets[0]], version)


def test_the_same_version_again_is_fine():
    cfg = config(DENSE)
    e, (buckets, version) = engine(cfg), shipment(cfg)
    before = e.generate(requests(2))
    assert load(e, buckets, version) == version.weight_digest
    assert [c.tokens for c in e.generate(requests(2))] == [c.tokens for c in before]
    assert e.stats().weight_updates == 2


def test_another_plan_is_refused_and_both_digests_named():
    cfg = config(MOE, "w4a4")
    e, (buckets, version) = engine(cfg), shipment(config(MOE, "w4a16"))
    mine = resolve_plan(cfg).digest
    with pytest.raises(SyncError, match=f"theirs {version.plan_digest}, this engine's {mine}"):
        load(e, buckets, version)
    refused(e, version.plan_digest)
    with pytest.raises(SyncError, match="without begin_update"):
        e.load_bucket(buckets[0])
    with pytest.raises(SyncError, match="without begin_update"):
        e.finish_update()


def test_members_of_a_fusion_group_with_two_scales_are_refused():
    """A sender that is consistent in itself, digest included, but did not share the outer scale."""
    cfg = config(MOE, "w4a4")
    e, (buckets, version) = engine(cfg), shipment(cfg)
    name = "model.layers.0.self_attn.k_proj.weight_amax"
    changed = edit(buckets[:-1], lambda b: b[name].mul_(2) if name in b else None)
    sent, version = package([("all", from_wire(b)) for b in changed], 0, version.plan_digest)
    with pytest.raises(SyncError, match="q_proj.weight_amax: differs from the amax of another member"):
        load(e, sent, version)
    refused(e, "weights of step 0 failed")


def test_update_while_requests_run():
    cfg, seen = config(DENSE), []
    _, version = shipment(cfg)

    def update(stats):
        if not stats.running:
            return
        with pytest.raises(SyncError, match="cannot update weights while 2 requests are live"):
            e.begin_update(version)
        seen.append(stats.running)

    e = engine(cfg)
    e.progress = update
    e.generate(requests(2, max_new_tokens=3))
    assert seen == [2, 2]
