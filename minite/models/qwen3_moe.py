"""Qwen3-MoE: a top-k router and SwiGLU experts in every layer, no shared expert."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minite.models.family import Linear, ModelFamily
from minite.models.weight_ops import Rename, SplitGateUp, WeightOp

if TYPE_CHECKING:  # at run time config imports models, not the reverse
    from minite.config.schema import ModelConfig


class Qwen3Moe(ModelFamily):
    kind = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    model_type = "qwen3_moe"
    qk_norm = True
    mlp_sizes = {
        "num_experts": "num_experts",
        "experts_per_token": "num_experts_per_tok",
        "moe_intermediate_size": "moe_intermediate_size",
    }
    fixed = {
        **ModelFamily.fixed,
        "use_sliding_window": False,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    }
    must_be_written = frozenset({"norm_topk_prob"})

    def high_precision_role(self, name: str) -> str | None:
        return "router" if name.endswith(".mlp.gate") else super().high_precision_role(name)

    def split_axis(self, name: str) -> str | None:
        whole = ".mlp.experts." in name or name.endswith(".mlp.gate")  # experts are spread whole, routers repeated
        return None if whole else super().split_axis(name)

    def grouped_gemm(self, name: str) -> str | None:
        layer, found, expert = name.partition(".experts.")
        return f"{layer}.experts.{expert.partition('.')[2]}" if found else None

    def token_share(self, cfg: ModelConfig, name: str) -> float:
        return cfg.experts_per_token / cfg.num_experts if ".mlp.experts." in name else 1.0

    def mlp_linears(self, cfg: ModelConfig, layer: int) -> list[Linear]:
        mlp, hidden, wide = f"model.layers.{layer}.mlp", cfg.hidden_size, cfg.moe_intermediate_size
        result: list[Linear] = [(f"{mlp}.gate", cfg.num_experts, hidden)]
        for e in range(cfg.num_experts):
            result += [
                (f"{mlp}.experts.{e}.gate_proj", wide, hidden),
                (f"{mlp}.experts.{e}.up_proj", wide, hidden),
                (f"{mlp}.experts.{e}.down_proj", hidden, wide),
            ]
        return result

    def mlp_ops(self, cfg: ModelConfig, layer: int) -> list[WeightOp]:
        mcore, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        ops: list[WeightOp] = [Rename(f"{mcore}.router.weight", (f"{hf}.gate.weight",))]
        for e in range(cfg.num_experts):
            expert = f"{hf}.experts.{e}"
            ops.append(
                SplitGateUp(
                    f"{mcore}.experts.linear_fc1.weight{e}", (f"{expert}.gate_proj.weight", f"{expert}.up_proj.weight")
                )
            )
            ops.append(Rename(f"{mcore}.experts.linear_fc2.weight{e}", (f"{expert}.down_proj.weight",)))
        return ops
