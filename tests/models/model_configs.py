"""Small model configurations with sizes that are all different."""

from __future__ import annotations

from minite.config.schema import ModelConfig


def config(kind: str, **sizes) -> ModelConfig:
    base = {
        "num_layers": 2,
        "hidden_size": 24,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 6,
        "vocab_size": 40,
    }
    if kind == "qwen3":
        base |= {"intermediate_size": 20}
    else:
        base |= {"num_experts": 3, "experts_per_token": 2, "moe_intermediate_size": 10}
    return ModelConfig(kind=kind, **(base | sizes))
