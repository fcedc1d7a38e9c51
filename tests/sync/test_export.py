"""sync.export: the codes of the fused matrix, streamed, complete, and every fault named."""

import random

import pytest
import torch
from small_model import FORMATS, recipe, shapes, weights

from minite.backends.registry import get_backend
from minite.config import resolve_plan
from minite.config.operands import OPERANDS
from minite.formats import operand_amax, quantize_operand
from minite.sync.errors import SyncError
from minite.sync.export import pack
from minite.sync.stored import from_parts, stored_model, stored_parts, to_parts
from minite.sync.verify import compare

REFERENCE = get_backend("reference", device="cpu", strict=False)
QKV = [f"model.layers.1.self_attn.{x}_proj" for x in "qkv"]
EXPERT = [f"model.layers.0.mlp.experts.2.{x}_proj" for x in ("gate", "up")]


def packed(config, named=None, **options):
    groups = pack(resolve_plan(config), named or weights(config).items(), REFERENCE, **options)
    return {name: tensor for _, tensors in groups for name, tensor in tensors.items()}


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("fmt", ["bf16", *FORMATS])
def test_names_shapes_and_dtypes(fmt, kind):
    config = recipe(fmt, kind)
    sent = packed(config, shapes=shapes(config))
    wanted = stored_model(resolve_plan(config), config.model)
    assert sent.keys() == wanted.keys()
    for name, stored in wanted.items():
        assert (tuple(sent[name].shape), sent[name].dtype) == (stored.shape, stored.dtype), name


@pytest.mark.parametrize("members", [QKV, EXPERT, ["model.layers.1.self_attn.o_proj"]], ids=["qkv", "gate_up", "o"])
@pytest.mark.parametrize("fmt", list(FORMATS))
def test_members_equal_the_quantized_concatenation(fmt, members):
    config = recipe(fmt)
    full, sent = weights(config), packed(config)
    operand = FORMATS[fmt]["weight"]
    fused_NK = torch.cat([full[f"{m}.weight"] for m in members])
    wanted = quantize_operand(fused_NK, operand)
    suffixes = to_parts(wanted).keys() - {"weight_amax"}
    stacked = {s: torch.cat([sent[f"{m}.{s}"].view(torch.uint8) for m in members]) for s in suffixes}
    assert compare(stacked, {s: to_parts(wanted)[s].view(torch.uint8) for s in suffixes}) is None
    for m in members if operand != "mxfp8" else []:
        assert torch.equal(sent[f"{m}.weight_amax"], operand_amax(fused_NK, operand))
    if len(members) > 1 and operand != "mxfp8":  # and the shared scale matters: alone, some member would differ
        alone = [quantize_operand(full[f"{m}.weight"], operand) for m in members]
        assert any(not torch.equal(q.codes, sent[f"{m}.weight"]) for q, m in zip(alone, members, strict=True))


def test_parts_round_trip():
    q = quantize_operand(weights(recipe("bf16"))["lm_head.weight"], "nvfp4_1d")
    assert from_parts("nvfp4_1d", to_parts(q)).bytes_equal(q)
    for operand in [name for name, o in OPERANDS.items() if o.module and "weight" in o.roles]:
        w_NK = torch.randn(256, 384, generator=torch.Generator().manual_seed(1))
        m = quantize_operand(w_NK, operand)
        parts = to_parts(m)
        assert from_parts(operand, parts).bytes_equal(m)
        stored = stored_parts(operand, 256, 384, torch.bfloat16)
        assert {s: (tuple(p.shape), p.dtype) for s, p in parts.items()} == {
            suffix: (want.shape, want.dtype) for suffix, want in stored.items()
        }


def test_unquantized_tensors_pass_untouched():
    config = recipe("w4a4")
    full = weights(config)
    sent = packed(config, full.items())
    for name in ("model.embed_tokens.weight", "model.layers.0.mlp.gate.weight", "lm_head.weight", "model.norm.weight"):
        assert sent[name] is full[name]


def test_order_does_not_matter():
    config = recipe("w4a4")
    shuffled = list(weights(config).items())
    random.Random(0).shuffle(shuffled)
    assert compare(packed(config, shuffled), packed(config)) is None


def test_streams_one_group_at_a_time():
    config = recipe("w4a4")
    taken: list[str] = []

    def named():
        for name, tensor in weights(config).items():
            taken.append(name)
            yield name, tensor

    for _, tensors in pack(resolve_plan(config), named(), REFERENCE, shapes=shapes(config)):
        sent = {f"{name.rpartition('.')[0]}.weight" for name in tensors}
        assert taken[-1] in sent  # what was read last completes what is sent now: nothing is hoarded
        assert len(sent) <= 3


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda t: t.pop(f"{QKV[1]}.weight"), rf"^{QKV[1]}.weight: missing from the exported weights \(1 missing"),
        (lambda t: t.pop("model.norm.weight"), "^model.norm.weight: missing"),
        (lambda t: t.update({"rope.inv_freq": torch.ones(2)}), "^rope.inv_freq: not a parameter of this model"),
        (lambda t: t.update({f"{QKV[0]}.weight": torch.ones(32, 64)}), rf"^{QKV[0]}.weight: .*\[32, 64\].*\[64, 64\]"),
        (lambda t: t[f"{EXPERT[0]}.weight"][3].fill_(torch.inf), f"^{EXPERT[0]}.weight: holds NaN or Inf"),
        (lambda t: t["model.norm.weight"][1].fill_(torch.nan), "^model.norm.weight: holds NaN or Inf"),
    ],
)
def test_faults_are_named(change, text):
    config = recipe("w4a4")
    named = weights(config)
    change(named)
    with pytest.raises(SyncError, match=text):
        packed(config, named.items(), shapes=shapes(config))


def test_duplicates_are_named():
    config = recipe("w4a4")
    named = [*weights(config).items(), ("lm_head.weight", torch.zeros(40, 64))]
    with pytest.raises(SyncError, match="^lm_head.weight: exported twice"):
        packed(config, named)


def test_without_shapes_quantized_linears_are_still_checked():
    config = recipe("w4a4")
    named = weights(config)
    del named["model.norm.weight"]
    packed(config, named.items())
    del named[f"{EXPERT[1]}.weight"]
    with pytest.raises(SyncError, match=f"^{EXPERT[1]}.weight: missing"):
        packed(config, named.items())
