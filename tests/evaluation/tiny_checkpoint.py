"""A Llama of bytes, random weights, with its tokenizer, as a Hugging Face directory; and recipes for it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch

from minite.config import RunConfig, load_recipe
from minite.config.schema import ModelConfig
from minite.models import get_model
from minite.models.hf_config import write_hf_config
from minite.sync.checkpoint import CheckpointWriter

MODEL = {
    "kind": "llama", "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16,
    "vocab_size": 272, "intermediate_size": 96, "rope_theta": 1e4, "rms_norm_eps": 1e-5, "tie_word_embeddings": True,
    "max_seq_len": 160, "dtype": "fp32",
}  # fmt: skip
TEMPLATE = "{% for m in messages %}{{ m.content }}<end>{% endfor %}"


def recipe(folder: Path, name: str, checkpoint: Path, weight: str = "bf16", inp: str = "bf16") -> Path:
    """A recipe file, in JSON, which YAML contains."""
    data = {
        "model": MODEL,
        "data": {"tokenizer": str(checkpoint), "chat_template": True},
        "sampler": {"kv_tokens": 2048, "max_new_tokens": 32},
    }
    if weight != "bf16":
        rules = [{"match": "model.layers.**", "use": "q"}, {"match": "**", "use": "bf16"}]
        data["precision"] = {"formats": {"q": {"weight": weight, "input": inp}}, "rules": rules}
    (folder / f"{name}.yaml").write_text(json.dumps(data))
    return folder / f"{name}.yaml"


def config(folder: Path, checkpoint: Path, *formats: str) -> RunConfig:
    return load_recipe(recipe(folder, "made", checkpoint, *formats))


def write_checkpoint(
    directory: Path,
    change: Callable[[str, dict[str, torch.Tensor]], torch.Tensor] = lambda name, weights: weights[name],
) -> dict[str, torch.Tensor]:
    """Returns the weights, by name. ``change`` makes one of those that were drawn so far, itself included."""
    model = ModelConfig(**MODEL)
    g, weights = torch.Generator().manual_seed(0), {}
    with CheckpointWriter(directory) as writer:
        for name, shape in get_model("llama").hf_tensors(model).items():
            weights[name] = (
                torch.ones(shape) if len(shape) == 1 else torch.randn(shape, generator=g) * shape[-1] ** -0.5
            )
            weights[name] = change(name, weights)
            writer.add(name, weights[name])
        writer.write_json("config.json", write_hf_config(model))
    save_tokenizer(directory)
    return weights


def save_tokenizer(directory: Path) -> None:
    """One token for each byte, and <end>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    inner = Tokenizer(models.BPE(vocab, []))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", chat_template=TEMPLATE)
    tokenizer.save_pretrained(directory)
