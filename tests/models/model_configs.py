"""Small model configurations with sizes that are all different."""

from __future__ import annotations

from minite.config.schema import ModelConfig
from minite.models import get_model


def config(kind: str, **sizes) -> ModelConfig:
    base = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "vocab_size": 40,
    }
    mlp = {"intermediate_size": 20, "num_experts": 3, "experts_per_token": 2, "moe_intermediate_size": 10}
    base |= {name: mlp[name] for name in get_model(kind).mlp_sizes}
    return ModelConfig(kind=kind, **(base | sizes))
