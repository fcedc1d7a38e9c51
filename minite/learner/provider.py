"""The modules that miniTE puts into megatron's GPTModel, and the spec that says where.

Megatron keeps what it is good at: parallel groups, parameter sharding, token dispatch, gradient reduction. Every
number that the sampler must reproduce is computed by ``minite.layers``. Layout: hidden states are [T, 1, H] (T packed
tokens); with tensor parallelism they are split along T between the GEMMs (sequence parallelism), always.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from minite.backends.base import Fused
from minite.layers import ops
from minite.learner.precision import Matmul


@dataclass
class PolicyConfig(TransformerConfig):
    """Megatron's config and what miniTE's modules read beside it."""

    device: torch.device = torch.device("cpu")
    strict: bool = False  # accumulate in FP64
    logits_dtype: torch.dtype | None = None  # what logits are rounded to; None = as accumulated


@dataclass
class PackedParams(PackedSeqParams):
    """What attention needs of a microbatch: offsets of the sequences and the rotation of each position."""

    cos_TD: Tensor | None = None  # float32 [T, head_dim / 2]
    sin_TD: Tensor | None = None


class RMSNorm(torch.nn.Module):
    """RMS norm over the last axis, for hidden states and for the heads of q and k."""

    fused: Fused | None = None  # set by precision.bind

    def __init__(self, config: PolicyConfig, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.eps, self.strict = eps, config.strict
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype, device=config.device))
        # Each tensor-parallel rank sees a part of the tokens (or of the heads): megatron sums such gradients over TP.
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        return ops.rms_norm(x, self.weight, self.eps, self.strict, self.fused)


class PackedAttention(torch.nn.Module):
    """RoPE and causal attention over packed sequences. q [T, heads, D], k and v [T, KV heads, D] -> [T, heads * D]."""

    fused: Fused | None = None  # set by precision.bind

    def __init__(self, config: PolicyConfig, **_: Any) -> None:  # megatron also passes mask type, groups, layer number
        super().__init__()
        self.scale, self.strict = config.kv_channels**-0.5, config.strict

    def forward(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, _: None, **kwargs: Any) -> Tensor:
        packed: PackedParams = kwargs["packed_seq_params"]
        q_THD = ops.apply_rope(q_THD, packed.cos_TD, packed.sin_TD, self.strict)
        k_THD = ops.apply_rope(k_THD, packed.cos_TD, packed.sin_TD, self.strict)
        out_THD = ops.attention(q_THD, k_THD, v_THD, packed.cu_seqlens_q, self.scale, self.strict, self.fused)
        return out_THD.flatten(1)


class ColumnLinear(ColumnParallelLinear):
    """Rows of the weight are split over TP: x [T, 1, K], gathered to all tokens -> [T, 1, N / TP]."""

    matmul: Matmul  # set by precision.bind

    def forward(self, x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        x = gather_from_sequence_parallel_region(x, group=self.tp_group)
        return self.matmul(x.flatten(0, 1), self.weight, self.config.params_dtype)[:, None], None


class RowLinear(RowParallelLinear):
    """Columns of the weight are split over TP: x [T, 1, K / TP] -> [T / TP, 1, N], summed over TP, rounded once."""

    matmul: Matmul  # set by precision.bind

    def forward(self, x: Tensor) -> Any:
        if self.matmul.hooks.partial is not None:
            return self.matmul(x.flatten(0, 1), self.weight, x.dtype)[:, None], None
        partial = self.matmul(x.flatten(0, 1), self.weight, ops.work_dtype(self.config.strict))[:, None]
        summed = reduce_scatter_to_sequence_parallel_region(partial, group=self.tp_group)
        return ops.round_output(summed, x.dtype), None


class LogitsLinear(ColumnParallelLinear):
    """The LM head: logits of all tokens over the whole vocabulary, on every TP rank. FP32, FP64 in strict mode."""

    fused: Fused | None = None  # set by precision.bind

    def forward(self, x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        x = gather_from_sequence_parallel_region(x, group=self.tp_group)
        weight = self.weight if weight is None else weight
        logits_TV = ops.wide_linear(x.flatten(0, 1), weight, self.config.strict, self.fused)
        if self.config.logits_dtype is not None:
            logits_TV = logits_TV.to(self.config.logits_dtype)
        return gather_from_tensor_model_parallel_region(logits_TV, group=self.tp_group)[:, None], None


class DenseMLP(MLP):
    """SwiGLU MLP of a dense model."""

    def __init__(self, config: PolicyConfig) -> None:
        submodules = MLPSubmodules(linear_fc1=ColumnLinear, linear_fc2=RowLinear)
        super().__init__(config, submodules, ffn_hidden_size=config.ffn_hidden_size)

    def forward(self, x: Tensor, padding_mask: None = None) -> Any:
        gate_up, _ = self.linear_fc1(x)
        return self.linear_fc2(ops.swiglu(gate_up, self.config.strict))


def add_residual(training: bool, fused: bool) -> Any:
    """Megatron's bias-dropout-add without bias and dropout: one addition in the storage dtype."""
    return lambda x_and_bias, residual, dropout: residual + x_and_bias[0]


def block_spec(config: PolicyConfig) -> TransformerBlockSubmodules:
    """The decoder: equal layers of attention and either a dense MLP or experts, and the final norm."""
    from minite.learner.moe import MoE  # it needs the modules above

    head_norm = RMSNorm if config.qk_layernorm else None
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=ColumnLinear,
            core_attention=PackedAttention,
            linear_proj=RowLinear,
            q_layernorm=head_norm,
            k_layernorm=head_norm,
        ),
    )
    layer = ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=RMSNorm,
            self_attention=attention,
            self_attn_bda=add_residual,
            pre_mlp_layernorm=RMSNorm,
            # Classes, not ModuleSpecs: megatron passes a fixed set of arguments to the MLP specs it knows by name.
            mlp=DenseMLP if config.num_moe_experts is None else MoE,
            mlp_bda=add_residual,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * config.num_layers, layer_norm=RMSNorm)
