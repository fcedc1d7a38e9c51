"""The families of minite.models, forward only and incremental: the learner's computation by the same functions.

The model does not know whether it prefills or decodes: ``attend`` (kv_cache.Prefill or Decode) stores the new keys and
values and returns the attention output.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from minite.backends.base import Backend
from minite.backends.refresh import addresses
from minite.config.plan import PrecisionPlan
from minite.config.schema import ModelConfig
from minite.layers import ops
from minite.layers.linear import check_supported
from minite.models import get_model
from minite.sampler.embedded.weights import Linear, Weights

Pools = tuple[Tensor, Tensor, Tensor]  # keys and values [slots, KV heads, D] of a layer, slots int64 [T] of new ones


class Attend(Protocol):
    """Attention with its keys and values."""

    def pools(self, layer: int) -> Pools | None: ...  # where new keys and values may be written at once

    # attention output [T, heads, D]; k and v are the pools where they were written at once
    def __call__(self, layer: int, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Normed:
    """Hidden states behind a norm. At least one of the two; what a fused kernel quantized, the GEMM need not."""

    h_TH: Tensor | None  # None: only the GEMM reads it
    quantized: object | None  # as quantize_input gives it


class Layer:
    """Names and GEMMs of one decoder layer."""

    def __init__(self, weights: Weights, model: ModelConfig, index: int) -> None:
        prefix = f"model.layers.{index}"
        self.input_norm = weights.plain(f"{prefix}.input_layernorm.weight")
        has_norm = get_model(model.kind).qk_norm
        q_norm, k_norm = (f"{prefix}.self_attn.{x}_norm.weight" for x in "qk")
        self.qk_norm = (weights.plain(q_norm), weights.plain(k_norm)) if has_norm else None
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
        self.config, self.backend, self.strict, self.device = model, backend, plan.alignment == "strict", device
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
        """To be called when new weights are in. They lie where the old ones lay, or ``addresses`` changes."""
        for linear in self.weights.linears:
            linear.prepare(self.backend)
        self.addresses = tuple(at for linear in self.weights.linears for at in addresses(linear.prepared))
        # kept in the dtype that wide_linear computes in, so that it need not convert them at every step
        as_stored = self.fused is not None and self.dtype == torch.bfloat16
        self.wide_lm_head = self.lm_head if as_stored else self.lm_head.to(ops.work_dtype(self.strict))

    def step_by_step(self) -> str | None:
        """Why a decode step cannot be a CUDA graph here; None: it can, and rows know nothing of each other."""
        inputs = {linear.input_operand for linear in self.weights.linears} - {"nvfp4_row", "bf16"}
        if self.device.type != "cuda":
            return f"CUDA graphs need a CUDA device; this is {self.device}"
        if self.fused is None or self.dtype != torch.bfloat16:
            return f"backend {self.backend.name} has no fused kernels for {self.dtype}; its steps wait for the device"
        if inputs:
            return f"inputs {', '.join(sorted(inputs))} are quantized step by step or by batch"
        if not self.fused.decodes(self.config.num_heads, self.config.num_kv_heads, self.config.head_dim):
            return f"no fused attention for heads of {self.config.head_dim}"
        return None

    @torch.inference_mode()
    def forward(
        self, token_T: Tensor, position_T: Tensor, attend: Attend, last_B: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Logits after the tokens at ``last_B`` (None = after every token), and the experts of every token.

        token_T, position_T int64 [T]. Returns logits float32 (float64 in strict mode) [B, V], and expert ids int16
        [T, MoE layers, k], None for a dense model.
        """
        config = self.config
        cos, sin = ops.rope_cos_sin(position_T, config.head_dim, config.rope_theta)
        x_TH, y_TH = self.embedding[token_T], None
        chosen: list[Tensor] = []
        for i, layer in enumerate(self.layers):
            x_TH, h = self._norm_for(layer.qkv, x_TH, y_TH, layer.input_norm)
            q, k, v = self._heads(layer, h, cos, sin, attend.pools(i))
            y_TH = self._linear(layer.o, attend(i, q, k, v).flatten(1))
            x_TH, h = self._norm_for(layer.gate_up, x_TH, y_TH, layer.mlp_norm)
            if config.num_experts:
                y_TH, expert_Tk = self._moe(layer, h)
                chosen.append(expert_Tk)
            else:
                y_TH = self._linear(layer.down, ops.swiglu(self._linear(layer.gate_up, h), self.strict, self.fused))
        assert y_TH is not None
        if last_B is not None:
            x_TH, y_TH = x_TH[last_B], y_TH[last_B]
        _, h_TH = self._add_norm(x_TH, y_TH, self.final_norm)
        logits = ops.wide_linear(h_TH, self.wide_lm_head, self.strict, self.fused)
        if self.logits_dtype is not None:
            logits = logits.to(self.logits_dtype).to(logits.dtype)
        return logits, torch.stack(chosen, dim=1).to(torch.int16) if chosen else None

    def _add_norm(self, x_TH: Tensor, y_TH: Tensor | None, w_H: Tensor) -> tuple[Tensor, Tensor]:
        """x + y, or x, and its norm."""
        eps = self.config.rms_norm_eps
        if y_TH is not None and self.fused is not None:
            out = self.fused.add_rms_norm(x_TH, y_TH, w_H, eps)
            if out is not None:
                return out
        x_TH = x_TH if y_TH is None else x_TH + y_TH
        return x_TH, ops.rms_norm(x_TH, w_H, eps, self.strict, self.fused)

    def _norm_for(self, linear: Linear, x_TH: Tensor, y_TH: Tensor | None, w_H: Tensor) -> tuple[Tensor, Normed]:
        """x + y, or x, and its norm as ``linear`` reads it. A router beside experts reads the norm itself."""
        if self.fused is not None:
            how, eps = linear.input_operand, self.config.rms_norm_eps
            out = self.fused.norm_quantize(x_TH, y_TH, w_H, eps, how, linear.prepared, keep=linear.grouped)
            if out is not None:
                return out[0], Normed(*out[1:])
        x_TH, h_TH = self._add_norm(x_TH, y_TH, w_H)
        return x_TH, Normed(h_TH, None)

    def _heads(
        self, layer: Layer, h: Normed, cos: Tensor, sin: Tensor, pools: Pools | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v [T, heads, D], normed and rotated. k and v may already lie in the pools: then those."""
        config, strict, eps = self.config, self.strict, self.config.rms_norm_eps
        heads = (config.num_heads, config.num_kv_heads, config.num_kv_heads)
        qkv_THD = self._linear(layer.qkv, h).unflatten(-1, (sum(heads), config.head_dim))
        if self.fused is not None:
            placed = self.fused.heads(qkv_THD, config.num_kv_heads, layer.qk_norm, eps, cos, sin, pools)
            if placed is not None:
                return placed
        q, k, v = qkv_THD.split(heads, dim=1)
        if layer.qk_norm is not None:
            q, k = (ops.rms_norm(x, w, eps, strict, self.fused) for x, w in zip((q, k), layer.qk_norm, strict=True))
        return ops.apply_rope(q, cos, sin, strict), ops.apply_rope(k, cos, sin, strict), v

    def _linear(self, linear: Linear, x: Tensor | Normed) -> Tensor:
        normed = x if isinstance(x, Normed) else Normed(x, None)
        a_MK = normed.quantized
        if a_MK is None:
            assert normed.h_TH is not None
            a_MK = self.backend.quantize_input(normed.h_TH, linear.input_operand)
        return self.backend.gemm(a_MK, linear.prepared, self.dtype)

    def _moe(self, layer: Layer, h: Normed) -> tuple[Tensor, Tensor]:
        config, strict, h_TH = self.config, self.strict, h.h_TH
        assert h_TH is not None
        logits_TE = ops.wide_linear(h_TH, layer.router, strict, self.fused)
        routed = None if self.fused is None else self.fused.route(logits_TE, config.experts_per_token)
        prob_Tk, expert_Tk = routed or ops.route_topk(logits_TE, config.experts_per_token)
        if self.fused is not None:
            inputs = layer.gate_up.input_operand, layer.down.input_operand
            weights = layer.gate_up.prepared, layer.down.prepared
            y_TH = self.fused.experts(h_TH, prob_Tk, expert_Tk, config.num_experts, *weights, inputs, h.quantized)
            if y_TH is not None:
                return y_TH, expert_Tk
        h_RH, token_R, rows_E, slot_R = ops.moe_permute(h_TH, expert_Tk, config.num_experts)
        gate_up_R2I = self._experts(layer.gate_up, h_RH, rows_E)
        y_RH = self._experts(layer.down, ops.swiglu(gate_up_R2I, strict), rows_E)
        return ops.moe_combine(y_RH, prob_Tk.flatten()[slot_R], token_R, len(h_TH), strict), expert_Tk

    def _experts(self, linear: Linear, x_RK: Tensor, rows_E: Tensor) -> Tensor:
        a_RK = self.backend.quantize_input(x_RK, linear.input_operand)
        return self.backend.grouped_gemm(a_RK, linear.prepared, rows_E, self.dtype)
