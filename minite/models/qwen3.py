"""Qwen3 dense: one SwiGLU MLP per layer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minite.models.family import Linear, ModelFamily
from minite.models.weight_ops import Rename, SplitGateUp, WeightOp

if TYPE_CHECKING:  # at run time config imports models, not the reverse
    from minite.config.schema import ModelConfig


class Qwen3(ModelFamily):
    kind = "qwen3"
    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"

    def mlp_linears(self, cfg: ModelConfig, layer: int) -> list[Linear]:
        mlp, hidden, wide = f"model.layers.{layer}.mlp", cfg.hidden_size, cfg.intermediate_size
        return [
            (f"{mlp}.gate_proj", wide, hidden),
            (f"{mlp}.up_proj", wide, hidden),
            (f"{mlp}.down_proj", hidden, wide),
        ]

    def mlp_ops(self, cfg: ModelConfig, layer: int) -> list[WeightOp]:
        mcore, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        return [
            SplitGateUp(f"{mcore}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight")),
            Rename(f"{mcore}.linear_fc2.weight", (f"{hf}.down_proj.weight",)),
        ]
