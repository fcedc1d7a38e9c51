"""A small model of each kind with random weights, for the tests of export and conversion."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.config import RunConfig, config_from_dict
from minite.models import get_model

FORMATS = {
    "w4a4": {"weight": "nvfp4_1d", "input": "nvfp4_row"},
    "w4a4_2d": {"weight": "nvfp4_2d", "input": "nvfp4_row"},
    "w4a16": {"weight": "nvfp4_1d"},
    "w4a8": {"weight": "nvfp4_1d", "input": "mxfp8"},
    "w8a8": {"weight": "mxfp8", "input": "mxfp8"},
}


def recipe(fmt: str, kind: str = "qwen3_moe", tied: bool = False, **precision: object) -> RunConfig:
    """Every linear of the decoder but the router in ``fmt``; "bf16" quantizes nothing. ``tied``: no lm_head."""
    sizes = {"num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 40}
    sizes["tie_word_embeddings"] = tied
    mlp = {"num_experts": 3, "experts_per_token": 2, "moe_intermediate_size": 32}
    if kind != "qwen3_moe":
        mlp = {"intermediate_size": 96}
    if fmt != "bf16":
        router = [{"match": "**.mlp.gate", "use": "bf16"}] if kind == "qwen3_moe" else []
        rules = [*router, {"match": "model.layers.**", "use": fmt}, {"match": "**", "use": "bf16"}]
        precision = {"formats": {fmt: FORMATS[fmt]}, "rules": rules, **precision}
    return config_from_dict(
        {"name": "small", "model": {"kind": kind, **sizes, **mlp}, "precision": precision}, "small.yaml"
    )


def shapes(config: RunConfig) -> dict[str, tuple[int, ...]]:
    return get_model(config.model.kind).hf_tensors(config.model)


def weights(config: RunConfig, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """Random weights whose scale differs from tensor to tensor, so that a wrong amax shows."""
    g = torch.Generator().manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=g) * torch.rand((), generator=g)).to(dtype)
        for name, shape in shapes(config).items()
    }
