"""Hugging Face directories: what is written is read back, and what does not fit is an error with a name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from minite.errors import UserError
from minite.learner import hf
from minite.models import get_model
from minite.models.hf_config import read_hf_config, write_hf_config
from tests.learner.tiny_policy import recipe

CONFIG = recipe()
MODEL = CONFIG.model


def _full_parameters():
    """Random megatron parameters of the tiny model, from random HF ones."""
    ops, shapes = get_model(MODEL.kind).megatron_ops(MODEL), get_model(MODEL.kind).hf_tensors(MODEL)
    named = {name: torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16)
             for i, (name, shape) in enumerate(shapes.items())}  # fmt: skip
    return ops, shapes, named, ops.from_hf(named)


def test_written_directory_reads_back(tmp_path):
    ops, shapes, named, full = _full_parameters()
    hf.write(tmp_path / "hf", full.items(), ops, CONFIG)
    read = hf.reader(tmp_path / "hf", CONFIG)
    assert all(torch.equal(read(name, shapes[name]), tensor) for name, tensor in named.items())
    assert read_hf_config(tmp_path / "hf").hidden_size == MODEL.hidden_size
    with pytest.raises(UserError, match="exists already"):
        hf.write(tmp_path / "hf", full.items(), ops, CONFIG)


def test_directory_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(UserError, match="model.checkpoint: .* has no \\*.safetensors file"):
        hf.reader(tmp_path, CONFIG)
    save_file({"a": torch.zeros(2, 3), "codes": torch.zeros(2, 3, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="config.json: no such file"):
        hf.reader(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(write_hf_config(MODEL)))
    read = hf.reader(tmp_path, CONFIG)
    with pytest.raises(UserError, match="no tensor b"):
        read("b", (2, 3))
    with pytest.raises(UserError, match=r"a is \[2, 3\] .* needs \[3, 2\]"):
        read("a", (3, 2))
    with pytest.raises(UserError, match="codes is .* U8"):
        read("codes", (2, 3))


@pytest.mark.parametrize("part", ["weight_scale", "weight_scale_inv"])
def test_a_quantized_directory_is_refused_before_anything_is_read(tmp_path, part):
    """Codes of block FP8 have the shape of the weight and a floating type: read as one they are off by the scale."""
    named = {"a.weight": torch.zeros(2, 3).to(torch.float8_e4m3fn), f"a.{part}": torch.ones(1, 1)}
    save_file(named, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(write_hf_config(MODEL)))
    with pytest.raises(UserError, match=f"is quantized already: it holds a.{part}; .* minite convert .* --to bf16"):
        hf.reader(tmp_path, CONFIG)
    save_file({"a.weight": named["a.weight"]}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="a.weight is .* F8_E4M3, but"):
        hf.reader(tmp_path, CONFIG)("a.weight", (2, 3))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        (
            "rope_theta",
            5e5,
            "the default: model.rope_theta is 1000000.0, but .*config.json says 500000.0; set model.rope_",
        ),
        ("rms_norm_eps", 1e-5, "model.rms_norm_eps is 1e-06, but .* says 1e-05"),
        ("num_experts_per_tok", 3, "model.experts_per_token is 2, but .* says 3; set model.experts_per_token: 3 or"),
        ("tie_word_embeddings", True, "model.tie_word_embeddings is False, but .* says True"),
        ("norm_topk_prob", False, "norm_topk_prob is False; miniTE computes only True"),
        ("model_type", "qwen3", "model.kind is 'qwen3_moe', but .* says 'qwen3'"),
    ],
)
def test_checkpoint_of_another_model_is_refused_although_shapes_fit(tmp_path, key, value, message):
    """The weights would load, and be another policy."""
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "model.safetensors")
    free = {"max_position_embeddings": 99, "initializer_range": 0.5, "torch_dtype": "float32", "intermediate_size": 96}
    data = write_hf_config(MODEL) | free
    (tmp_path / "config.json").write_text(json.dumps(data))
    hf.reader(tmp_path, CONFIG)
    (tmp_path / "config.json").write_text(json.dumps(data | {key: value}))
    with pytest.raises(UserError, match=message):
        hf.reader(tmp_path, CONFIG)


def test_initial_tensors_depend_on_seed_and_name():
    first = hf.initial_tensor("model.layers.0.mlp.experts.1.up_proj.weight", (300, 200), 0.02, 1)
    assert torch.equal(first, hf.initial_tensor("model.layers.0.mlp.experts.1.up_proj.weight", (300, 200), 0.02, 1))
    for name, seed in (("model.layers.0.mlp.experts.2.up_proj.weight", 1),
                       ("model.layers.0.mlp.experts.1.up_proj.weight", 2)):  # fmt: skip
        other = hf.initial_tensor(name, (300, 200), 0.02, seed)
        correlation = torch.corrcoef(torch.stack([first.flatten(), other.flatten()]))[0, 1]
        assert abs(correlation) < 5 / 60_000**0.5
    assert float(first.std()) == pytest.approx(0.02, rel=0.02)
    assert torch.equal(hf.initial_tensor("model.norm.weight", (7,), 0.02, 1), torch.ones(7))
