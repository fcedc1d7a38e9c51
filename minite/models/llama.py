"""Llama-style dense models (Llama 2, SmolLM2, ...): the common case without QK norm.

Scaled RoPE (Llama 3.1 and later) is refused with every other ``rope_scaling``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from minite.models.family import ModelFamily


class Llama(ModelFamily):
    kind = "llama"
    architecture = "LlamaForCausalLM"
    model_type = "llama"
    qk_norm = False
    fixed = {**ModelFamily.fixed, "mlp_bias": False}

    def hf_defaults(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Older checkpoints leave out what transformers' LlamaConfig derives or fills in."""
        heads, hidden = data.get("num_attention_heads"), data.get("hidden_size")
        return {
            **super().hf_defaults(data),
            "num_key_value_heads": heads,
            "head_dim": hidden // heads if heads and hidden else None,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "max_position_embeddings": 2048,
        }
