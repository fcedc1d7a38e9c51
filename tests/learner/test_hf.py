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

MODEL = recipe().model


def _full_parameters():
    """Random megatron parameters of the tiny model, from random HF ones."""
    ops, shapes = get_model(MODEL.kind).megatron_ops(MODEL), get_model(MODEL.kind).hf_tensors(MODEL)
    named = {name: torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(torch.bfloat16)
             for i, (name, shape) in enumerate(shapes.items())}  # fmt: skip
    return ops, shapes, named, ops.from_hf(named)


def test_written_directory_reads_back_whatever_the_file_size(tmp_path, monkeypatch):
    monkeypatch.setattr(hf, "FILE_BYTES", 20_000)
    ops, shapes, named, full = _full_parameters()
    hf.write(tmp_path, iter(full.items()), ops, write_hf_config(MODEL), keep=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    reader = hf.HFReader(tmp_path)
    assert all(torch.equal(reader.read(name, shapes[name]), tensor) for name, tensor in named.items())
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert set(index) == set(shapes) and all((tmp_path / file).exists() for file in index.values())
    assert read_hf_config(tmp_path).hidden_size == MODEL.hidden_size


def test_other_ranks_drain_and_write_nothing(tmp_path):
    ops, _, _, full = _full_parameters()
    left = iter(full.items())
    hf.write(tmp_path / "absent", left, ops, {}, keep=False)
    assert next(left, None) is None and not (tmp_path / "absent").exists()


def test_directory_that_does_not_fit_is_named(tmp_path):
    with pytest.raises(UserError, match="no \\*.safetensors file"):
        hf.HFReader(tmp_path)
    save_file({"a": torch.zeros(2, 3), "codes": torch.zeros(2, 3, dtype=torch.uint8)}, tmp_path / "model.safetensors")
    reader = hf.HFReader(tmp_path)
    with pytest.raises(UserError, match="no tensor b"):
        reader.read("b", (2, 3))
    with pytest.raises(UserError, match=r"a is \[2, 3\] .* needs \[3, 2\]"):
        reader.read("a", (3, 2))
    with pytest.raises(UserError, match="codes is .*uint8"):
        reader.read("codes", (2, 3))
    (tmp_path / "model-2.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0not json")
    with pytest.raises(UserError, match="damaged"):
        hf.HFReader(tmp_path)


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
