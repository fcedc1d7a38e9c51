"""What goes to the engines, without slime: parameter by parameter equal to the export as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minite.config import load_recipe, resolve_plan
from minite.models import get_model
from minite.sync.errors import SyncError
from minite.sync.export import FormatQuantizer, pack
from minite.sync.targets import to_disk
from minite.sync.verify import compare
from slime_plugin.export import QuantizeParams

RECIPES = Path(__file__).parents[2] / "recipes"


@pytest.fixture(scope="module")
def model():
    config = load_recipe(RECIPES / "tiny_qwen3_moe_w4a4_grpo.yaml")
    g = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=g).bfloat16()
        for name, shape in get_model(config.model.kind).hf_tensors(config.model).items()
    }
    return resolve_plan(config), tensors


def by_parameter(tensors):
    """As slime's converters hand them over: the members of one Megatron parameter together."""
    groups = {}
    for name, tensor in tensors.items():
        stem = name
        for member, fused in (
            ("q_proj", "qkv"),
            ("k_proj", "qkv"),
            ("v_proj", "qkv"),
            ("gate_proj", "fc1"),
            ("up_proj", "fc1"),
        ):
            stem = stem.replace(f".{member}.", f".{fused}.")
        groups.setdefault(stem, []).append((name, tensor))
    return groups


def test_equals_the_export_byte_for_byte(model):
    plan, tensors = model
    quantize, got = QuantizeParams(plan, FormatQuantizer()), {}
    for name, group in by_parameter(tensors).items():
        got |= dict(quantize(None, name, group, {"quant_method": "modelopt"}))
    expected = {}
    for _, sent in pack(plan, tensors.items(), FormatQuantizer()):
        expected |= to_disk("nvfp4", plan, sent, {})
    assert compare(got, expected) is None, compare(got, expected)


@pytest.mark.parametrize(
    ("index", "change", "expected"),
    [
        (slice(0, 2), None, "without model.layers.1.self_attn.v_proj, with which it shares one outer scale"),
        (slice(0, 3), lambda w: w[:, :-16], "exported with shape"),
        (slice(0, 3), lambda w: w * float("nan"), "holds NaN or Inf"),
    ],
)
def test_refuses_what_would_be_sent_wrong(model, index, change, expected):
    plan, tensors = model
    names = [f"model.layers.1.self_attn.{x}_proj.weight" for x in "qkv"][index]
    group = [(name, tensors[name] if change is None else change(tensors[name])) for name in names]
    with pytest.raises(SyncError, match=expected):
        QuantizeParams(plan, FormatQuantizer())(None, "linear_qkv", group, {})
