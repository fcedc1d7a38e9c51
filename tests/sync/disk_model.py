"""Directories of checkpoints for the tests of conversion: a plain one, and the same weights as others export them."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from small_model import weights
from torch import Tensor

from minite.backends.registry import get_backend
from minite.config import RunConfig
from minite.models.hf_config import write_hf_config
from minite.sync.checkpoint import INDEX
from minite.sync.convert import Report, convert

REFERENCE = get_backend("reference", device="cpu", strict=False)


def save(path: Path, tensors: dict[str, Tensor], config: RunConfig, shards: int = 2, **extra: object) -> Path:
    """A Hugging Face directory of the tensors in several files; ``extra`` goes into config.json."""
    path.mkdir()
    named = list(tensors.items())
    index = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(dict(named[i::shards]), path / file)
        index |= dict.fromkeys((name for name, _ in named[i::shards]), file)
    (path / INDEX).write_text(json.dumps({"weight_map": index}))
    (path / "config.json").write_text(json.dumps({**write_hf_config(config.model), **extra}))
    (path / "tokenizer.json").write_text("{}")
    return path


def source(path: Path, config: RunConfig, shards: int = 2, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Random weights, not quantized."""
    return save(path, weights(config, dtype=dtype), config, shards)


def run(source: Path, target: Path, config: RunConfig, to: str = "nvfp4", **options: object) -> Report:
    """convert with the reference backend."""
    return convert(source, target, config, REFERENCE, to, **options)


def contents(path: Path) -> dict[str, bytes]:
    """Every file of a directory, by name."""
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}


def tensors_of(path: Path) -> dict[str, Tensor]:
    """Every tensor that the index lists."""
    from minite.sync.checkpoint import Checkpoint

    disk = Checkpoint(path)
    return {name: disk.read(name) for name in disk.names}
