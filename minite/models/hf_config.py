"""Hugging Face config.json <-> ModelConfig. What miniTE cannot compute is refused, not ignored."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from minite.config.schema import ModelConfig
from minite.errors import UserError
from minite.models import FAMILIES, ModelFamily, get_model

# Our field -> the HF key, for all kinds; a family adds the sizes of its MLP.
_COMMON = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "rms_norm_eps": "rms_norm_eps",
    "rope_theta": "rope_theta",
    "tie_word_embeddings": "tie_word_embeddings",
    "max_seq_len": "max_position_embeddings",
    "init_std": "initializer_range",
}


def write_hf_config(cfg: ModelConfig) -> dict[str, Any]:
    """config.json of the model as JSON-ready data, in the form that released checkpoints use."""
    family = get_model(cfg.kind)
    names = {**_COMMON, **family.mlp_sizes}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{hf: getattr(cfg, name) for name, hf in names.items()},
        **family.fixed,
        "rope_scaling": None,
        "attention_dropout": 0.0,
        "torch_dtype": {"bf16": "bfloat16", "fp32": "float32"}[cfg.dtype],
    }


def read_hf_config(path: str | Path) -> ModelConfig:
    """ModelConfig of a checkpoint directory (or of its config.json), with ``checkpoint`` set to the directory.

    Raises UserError for a missing or damaged file, another architecture, a missing size and a setting that miniTE
    does not compute.
    """
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        raise UserError(f"{file}: no such file; expected the config.json of a Hugging Face checkpoint") from None
    except ValueError as error:
        raise UserError(f"{file}: not readable as JSON: {error}") from None
    if not isinstance(data, dict):
        raise UserError(f"{file}: got {type(data).__name__}, expected the object of a Hugging Face config.json")
    families = {family.model_type: family for family in FAMILIES.values()}
    family = families.get(str(data.get("model_type")))
    if family is None:
        raise UserError(f"{file}: model_type is {data.get('model_type')!r}, expected one of {', '.join(families)}")
    data = _current_names(data)
    _refuse(file, family, data)
    data = family.hf_defaults(data) | {key: value for key, value in data.items() if value is not None}
    values: dict[str, Any] = {}
    for name, hf in {**_COMMON, **family.mlp_sizes}.items():
        if data.get(hf) is None:
            raise UserError(f"{file}: key '{hf}' is missing; a {family.kind} checkpoint has it")
        values[name] = data[hf]
    dtype = {"float32": "fp32"}.get(str(data.get("dtype") or data.get("torch_dtype")), "bf16")
    return ModelConfig(kind=family.kind, dtype=dtype, checkpoint=str(file.parent), **values)


def _current_names(data: Mapping[str, Any]) -> dict[str, Any]:
    """transformers 5 writes some keys under new names; read both."""
    merged = dict(data)
    rope = data.get("rope_parameters") or {}
    if "rope_theta" in rope:
        merged.setdefault("rope_theta", rope["rope_theta"])
    if rope.get("rope_type", "default") != "default":
        merged.setdefault("rope_scaling", rope)
    if "num_local_experts" in data:
        merged.setdefault("num_experts", data["num_local_experts"])
    return merged


def _refuse(file: Path, family: ModelFamily, data: Mapping[str, Any]) -> None:
    if data.get("rope_scaling"):
        raise UserError(f"{file}: rope_scaling is {data['rope_scaling']!r}; only unscaled RoPE (null) is supported")
    for key, only in family.fixed.items():
        got = data.get(key, None if key in family.must_be_written else only)
        if got != only:
            raise UserError(f"{file}: {key} is {got!r}; miniTE computes only {only!r}")
