"""A decoder-only family: GQA with RoPE, RMS norms and a SwiGLU MLP. What is written here is the common case.

A family is a subclass that names itself and overrides what it does otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from minite.models.weight_ops import Rename, SplitGateUp, SplitQKV, WeightMap, WeightOp

if TYPE_CHECKING:  # at run time config imports models, not the reverse
    from minite.config.schema import ModelConfig

Linear = tuple[str, int, int]  # HF module path, rows N, columns K of its weight [N, K]


class ModelFamily:
    """Shapes and names of one architecture, and what of its config.json miniTE can compute."""

    kind: str  # model.kind in a recipe
    architecture: str  # in config.json: architectures[0]
    model_type: str  # in config.json
    qk_norm: bool  # an RMS norm over each head of q and of k, before RoPE
    # Sizes of the MLP: our field -> key of config.json. A recipe of this kind needs these, and no other kind's.
    mlp_sizes: Mapping[str, str] = {"intermediate_size": "intermediate_size"}
    # Settings of config.json that are computed in one way only. A missing key means that way, except for those in
    # must_be_written, where transformers' own default is another.
    fixed: Mapping[str, Any] = {"hidden_act": "silu", "attention_bias": False}
    must_be_written: frozenset[str] = frozenset()

    def hf_defaults(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """What a config.json of this family may leave out, and what it then means."""
        return {"tie_word_embeddings": False, "initializer_range": 0.02}

    def mlp_linears(self, cfg: ModelConfig, layer: int) -> list[Linear]:
        """Linears of one layer's MLP (a router counts as one)."""
        mlp, hidden, wide = f"model.layers.{layer}.mlp", cfg.hidden_size, cfg.intermediate_size
        return [
            (f"{mlp}.gate_proj", wide, hidden),
            (f"{mlp}.up_proj", wide, hidden),
            (f"{mlp}.down_proj", hidden, wide),
        ]

    def mlp_ops(self, cfg: ModelConfig, layer: int) -> list[WeightOp]:
        """Weight ops of one layer's MLP."""
        mcore, hf = f"decoder.layers.{layer}.mlp", f"model.layers.{layer}.mlp"
        return [
            SplitGateUp(f"{mcore}.linear_fc1.weight", (f"{hf}.gate_proj.weight", f"{hf}.up_proj.weight")),
            Rename(f"{mcore}.linear_fc2.weight", (f"{hf}.down_proj.weight",)),
        ]

    def high_precision_role(self, name: str) -> str | None:
        """Why this linear must stay BF16 or better ("lm_head" | "router"); None for one that may be quantized."""
        return "lm_head" if name == "lm_head" else None

    def split_axis(self, name: str) -> str | None:
        """Which axis of its weight [N, K] tensor parallelism splits: "N", "K" (results are then added up) or None."""
        return "K" if name.endswith((".o_proj", ".down_proj")) else "N"

    def grouped_gemm(self, name: str) -> str | None:
        """The grouped GEMM that computes this linear together with others of its layer; None if it has its own."""
        return None

    def token_share(self, cfg: ModelConfig, name: str) -> float:
        """Fraction of tokens that pass through this linear."""
        return 1.0

    def linears(self, cfg: ModelConfig) -> list[Linear]:
        """Every linear (name, n, k) in model order, unsharded, lm_head last (also when it shares the embedding)."""
        hidden, head_dim = cfg.hidden_size, cfg.head_dim
        q_rows, kv_rows = cfg.num_heads * head_dim, cfg.num_kv_heads * head_dim
        result: list[Linear] = []
        for layer in range(cfg.num_layers):
            attn = f"model.layers.{layer}.self_attn"
            result += [
                (f"{attn}.q_proj", q_rows, hidden),
                (f"{attn}.k_proj", kv_rows, hidden),
                (f"{attn}.v_proj", kv_rows, hidden),
                (f"{attn}.o_proj", hidden, q_rows),
            ]
            result += self.mlp_linears(cfg, layer)
        return [*result, ("lm_head", cfg.vocab_size, hidden)]

    def hf_tensors(self, cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
        """Every parameter of an HF checkpoint and its shape. Tied models store no lm_head.weight."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (cfg.vocab_size, cfg.hidden_size)}
        for layer in range(cfg.num_layers):
            prefix = f"model.layers.{layer}"
            shapes[f"{prefix}.input_layernorm.weight"] = (cfg.hidden_size,)
            if self.qk_norm:
                shapes[f"{prefix}.self_attn.q_norm.weight"] = (cfg.head_dim,)
                shapes[f"{prefix}.self_attn.k_norm.weight"] = (cfg.head_dim,)
            shapes[f"{prefix}.post_attention_layernorm.weight"] = (cfg.hidden_size,)
        shapes["model.norm.weight"] = (cfg.hidden_size,)
        for name, n, k in self.linears(cfg):
            if name != "lm_head" or not cfg.tie_word_embeddings:
                shapes[f"{name}.weight"] = (n, k)
        return shapes

    def megatron_ops(self, cfg: ModelConfig) -> WeightMap:
        """megatron-core GPTModel parameters (local spec names, full tensors) <-> HF parameters."""
        ops: list[WeightOp] = [Rename("embedding.word_embeddings.weight", ("model.embed_tokens.weight",))]
        for layer in range(cfg.num_layers):
            mcore, hf = f"decoder.layers.{layer}", f"model.layers.{layer}"
            q, k, v = (f"{hf}.self_attn.{x}_proj.weight" for x in "qkv")
            ops += [
                Rename(f"{mcore}.input_layernorm.weight", (f"{hf}.input_layernorm.weight",)),
                SplitQKV(
                    f"{mcore}.self_attention.linear_qkv.weight",
                    (q, k, v),
                    cfg.num_heads,
                    cfg.num_kv_heads,
                    cfg.head_dim,
                ),
            ]
            if self.qk_norm:
                ops += [
                    Rename(f"{mcore}.self_attention.{x}_layernorm.weight", (f"{hf}.self_attn.{x}_norm.weight",))
                    for x in "qk"
                ]
            ops += [
                Rename(f"{mcore}.self_attention.linear_proj.weight", (f"{hf}.self_attn.o_proj.weight",)),
                Rename(f"{mcore}.pre_mlp_layernorm.weight", (f"{hf}.post_attention_layernorm.weight",)),
            ]
            ops += self.mlp_ops(cfg, layer)
        ops.append(Rename("decoder.final_layernorm.weight", ("model.norm.weight",)))
        if not cfg.tie_word_embeddings:
            ops.append(Rename("output_layer.weight", ("lm_head.weight",)))
        return WeightMap(ops)
