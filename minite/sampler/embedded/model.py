"""The families of minite.models, forward only and incremental: the learner's computation by the same functions.

The model does not know whether it prefills or decodes: ``attend`` (kv_cache.Prefill or Decode) stores the new keys and
values and returns the attention output.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minite.backends.base import Backend
from minite.config.plan import PrecisionPlan
from minite.config.schema import ModelConfig
from minite.layers import ops
from minite.layers.linear import check_supported
from minite.models import get_model
from minite.sampler.embedded.weights import Linear, Weights

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v) -> attention output, all [T, heads, D]


class Layer:
    """Names and GEMMs of one decoder layer."""

    def __init__(self, weights: Weights, model: ModelConfig, index: int) -> None:
        prefix = f"model.layers.{index}"
        self.input_norm = weights.plain(f"{prefix}.input_layernorm.weight")
        has_norm = get_model(model.kind).qk_norm
        self.qk_norm = [weights.plain(f"{prefix}.self_attn.{x}_norm.weight") for x in "qk"] if has_norm else None
        self.mlp_norm = weights.plain(f"{prefix}.post_attention_layernorm.weight")
        self.qkv = weights.linear(*(f"{prefix}.self_attn.{x}_proj" for x in "qkv"))
        self.o = weights.linear(f"{prefix}.self_attn.o_proj")
        mlp = f"{prefix}.mlp"
        if model.num_experts:
            experts = [f"{mlp}.experts.{e}" for e in range(model.num_experts)]
            self.router = weights.plain(f"{mlp}.gate.weight")
            self.gate_up = weights.expert_linear((f"{e}.gate_proj", f"{e}.up_proj") for e in experts)
            self.down = weights.expert_linear((f"{e}.down_proj",) for e in experts)
        else:
            self.gate_up = weights.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj")
            self.down = weights.linear(f"{mlp}.down_proj")


class Model:
    """The network over the weights of one engine. UserError when the backend lacks a GEMM that the plan needs."""

    def __init__(self, plan: PrecisionPlan, model: ModelConfig, backend: Backend, device: torch.device) -> None:
        self.config, self.backend, self.strict = model, backend, plan.alignment == "strict"
        self.fused = backend.fused
        self.logits_dtype = torch.bfloat16 if plan.lm_head_dtype == "bf16" else None
        self.weights = Weights(plan, model, device)
        self.dtype = self.weights.dtype
        self.embedding = self.weights.plain("model.embed_tokens.weight")
        self.layers = [Layer(self.weights, model, i) for i in range(model.num_layers)]
        for linear in self.weights.linears:
            op = "grouped_gemm" if linear.grouped else "gemm"
            check_supported(op, linear.entry, backend, linear.entry.name)
        self.final_norm = self.weights.plain("model.norm.weight")
        self.lm_head = self.embedding if model.tie_word_embeddings else self.weights.plain("lm_head.weight")

    def prepare(self) -> None:
        """To be called when new weights are in."""
        for linear in self.weights.linears:
            linear.prepare(self.backend)
        # kept in the dtype that wide_linear computes in, so that it need not convert them at every step
        as_stored = self.fused is not None and self.dtype == torch.bfloat16
        self.wide_lm_head = self.lm_head if as_stored else self.lm_head.to(ops.work_dtype(self.strict))

    @torch.inference_mode()
    def forward(
        self, token_T: Tensor, position_T: Tensor, attend: Attend, last_B: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits after the tokens at ``last_B`` (None = after every token), and the experts of every token.

        token_T, position_T int64 [T]. Returns logits float32 (float64 in strict mode) [B, V], and expert ids int16
        [T, MoE layers, k], None for a dense model.
        """
        config, strict, eps = self.config, self.strict, self.config.rms_norm_eps
        cos, sin = ops.rope_cos_sin(position_T, config.head_dim, config.rope_theta)
        x_TH = self.embedding[token_T]
        chosen: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            q, k, v = self._qkv(layer, ops.rms_norm(x_TH, layer.input_norm, eps, strict))
            if layer.qk_norm is not None:
                q, k = (ops.rms_norm(x, norm, eps, strict) for x, norm in zip((q, k), layer.qk_norm, strict=True))
            q, k = (ops.apply_rope(x, cos, sin, strict) for x in (q, k))
            x_TH = x_TH + self._linear(layer.o, attend(i, q, k, v).flatten(1))
            h_TH = ops.rms_norm(x_TH, layer.mlp_norm, eps, strict)
            if config.num_experts:
                y_TH, expert_Tk = self._moe(layer, h_TH)
                chosen.append(expert_Tk.to(torch.int16))
            else:
                y_TH = self._linear(layer.down, ops.swiglu(self._linear(layer.gate_up, h_TH), strict, self.fused))
            x_TH = x_TH + y_TH
        if last_B is not None:
            x_TH = x_TH[last_B]
        x_TH = ops.rms_norm(x_TH, self.final_norm, eps, strict)
        logits = ops.wide_linear(x_TH, self.wide_lm_head, strict, self.fused)
        if self.logits_dtype is not None:
            logits = logits.to(self.logits_dtype).to(logits.dtype)
        return logits, torch.stack(chosen, dim=1) if chosen else None

    def _qkv(self, layer: Layer, h_TH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        config = self.config
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        qkv = self._linear(layer.qkv, h_TH).unflatten(-1, (sum(heads), config.head_dim))
        q, k, v = qkv.split(heads, dim=1)
        return q, k, v

    def _linear(self, linear: Linear, x_MK: Tensor) -> Tensor:
        a_MK = self.backend.quantize_input(x_MK, linear.input_operand)
        return self.backend.gemm(a_MK, linear.prepared, self.dtype)

    def _moe(self, layer: Layer, h_TH: Tensor) -> tuple[Tensor, Tensor]:
        config, strict = self.config, self.strict
        logits_TE = ops.wide_linear(h_TH, layer.router, strict, self.fused)
        prob_Tk, expert_Tk = ops.route_topk(logits_TE, config.experts_per_token)
        if self.fused is not None:
            inputs = layer.gate_up.input_operand, layer.down.input_operand
            weights = layer.gate_up.prepared, layer.down.prepared
            y_TH = self.fused.experts(h_TH, prob_Tk, expert_Tk, config.num_experts, *weights, inputs)
            if y_TH is not None:
                return y_TH, expert_Tk
        h_RH, token_R, rows_E, slot_R = ops.moe_permute(h_TH, expert_Tk, config.num_experts)
        gate_up_R2I = self._experts(layer.gate_up, h_RH, rows_E)
        y_RH = self._experts(layer.down, ops.swiglu(gate_up_R2I, strict), rows_E)
        return ops.moe_combine(y_RH, prob_Tk.flatten()[slot_R], token_R, len(h_TH), strict), expert_Tk

    def _experts(self, linear: Linear, x_RK: Tensor, rows_E: Tensor) -> Tensor:
        a_RK = self.backend.quantize_input(x_RK, linear.input_operand)
        return self.backend.grouped_gemm(a_RK, linear.prepared, rows_E, self.dtype)
