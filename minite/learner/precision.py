"""The precision plan -> the linears of a built model: which operands, which backend, which amax is shared over TP.

Megatron fuses q, k, v into one matrix and gate, up into another. Such a matrix is one fusion group of the plan: one
amax of the whole, reduced over the ranks that hold shards, so that every rank makes the codes of the unsharded matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import Tensor

from minite.backends.base import Backend
from minite.config import PlanEntry, PrecisionPlan
from minite.config.operands import OPERANDS
from minite.errors import UserError
from minite.layers.grouped_matmul import quant_grouped_matmul
from minite.layers.linear import check_supported
from minite.layers.matmul import AmaxHooks, PartialSums, quant_matmul
from minite.layers.weight_cache import WeightCache


@dataclass
class Matmul:
    """One quantized linear, weight passed at call time: x [M, K], w [N, K] -> [M, N] in ``out_dtype``."""

    name: str
    entry: PlanEntry
    backend: Backend
    hooks: AmaxHooks
    cache: WeightCache = field(default_factory=WeightCache)

    def __post_init__(self) -> None:
        check_supported("gemm", self.entry, self.backend, self.name)

    def __call__(self, x_MK: Tensor, w_NK: Tensor, out_dtype: torch.dtype) -> Tensor:
        return quant_matmul(
            x_MK, w_NK, self.entry, self.backend, self.cache, self.hooks, out_dtype=out_dtype, name=self.name
        )


@dataclass
class GroupedMatmul:
    """The linears of all local experts: rows x [R, K] sorted by expert, w [E, N, K], rows_E int64 -> [R, N]."""

    name: str
    entry: PlanEntry
    backend: Backend
    cache: WeightCache = field(default_factory=WeightCache)

    def __post_init__(self) -> None:
        check_supported("grouped_gemm", self.entry, self.backend, self.name)

    def __call__(self, x_RK: Tensor, w_ENK: Tensor, rows_E: Tensor) -> Tensor:
        return quant_grouped_matmul(x_RK, w_ENK, rows_E, self.entry, self.backend, self.cache, name=self.name)


def bind(model: GPTModel, plan: PrecisionPlan, backend: Backend, tp_group: torch.distributed.ProcessGroup) -> None:
    """Give every linear of ``model`` its part of the plan, whose own checks made members of one GEMM agree.

    Raises UserError when a shard would cut a quantization block, or the backend lacks a GEMM of these operands.
    """
    tp, config = tp_group.size(), model.config

    def shared_max(amax: Tensor) -> Tensor:
        if tp > 1:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=tp_group)
        return amax

    def rows_split(name: str, entry: PlanEntry, unit: int) -> Matmul:
        """The weight is split by rows, in runs of ``unit`` rows that stay together; each rank has the whole input."""
        _check_blocks(entry, unit, entry.k)
        return Matmul(name, entry, backend, AmaxHooks(reduce_weight_amax=shared_max))

    partial = PartialSums(
        reduce=lambda sums_MN: reduce_scatter_to_sequence_parallel_region(sums_MN, group=tp_group),
        own_rows=lambda values_M: values_M.chunk(tp)[tp_group.rank()],
        gather=lambda grad_mN: gather_from_sequence_parallel_region(grad_mN, group=tp_group),
    )

    def columns_split(entry: PlanEntry) -> Matmul:
        _check_blocks(entry, entry.n, entry.k // tp)
        hooks = AmaxHooks(shared_max, shared_max, partial if backend.strict and tp > 1 else None)
        return Matmul(entry.name, entry, backend, hooks)

    model.output_layer.fused = model.decoder.final_layernorm.fused = backend.fused
    for i, layer in enumerate(model.decoder.layers):
        attn, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        qkv, gate_up = plan[f"{attn}.q_proj"], f"{mlp}.gate_up_proj"
        layer.self_attention.linear_qkv.matmul = rows_split(f"{attn}.qkv_proj", qkv, config.kv_channels)
        layer.self_attention.linear_proj.matmul = columns_split(plan[f"{attn}.o_proj"])
        layer.self_attention.core_attention.fused = backend.fused
        layer.input_layernorm.fused = layer.pre_mlp_layernorm.fused = backend.fused
        if config.qk_layernorm:
            layer.self_attention.q_layernorm.fused = layer.self_attention.k_layernorm.fused = backend.fused
        if config.num_moe_experts is None:
            layer.mlp.linear_fc1.matmul = rows_split(gate_up, plan[f"{mlp}.gate_proj"], config.ffn_hidden_size // tp)
            layer.mlp.linear_fc2.matmul = columns_split(plan[f"{mlp}.down_proj"])
        else:  # experts are whole on their rank
            fc1, fc2 = (plan[f"{mlp}.experts.0.{x}_proj"] for x in ("gate", "down"))
            layer.mlp.experts.linear_fc1.matmul = GroupedMatmul(f"{mlp}.experts.gate_up_proj", fc1, backend)
            layer.mlp.experts.linear_fc2.matmul = GroupedMatmul(f"{mlp}.experts.down_proj", fc2, backend)
            layer.mlp.token_dispatcher.fused = layer.mlp.router.fused = backend.fused


def _check_blocks(entry: PlanEntry, rows: int, columns: int) -> None:
    """Blocks of a shard must be blocks of the whole, or its codes would not be those that the sampler is sent."""
    for operand, size, multiple in (
        (entry.weight, rows, OPERANDS[entry.weight].rows_multiple),
        (entry.weight, columns, OPERANDS[entry.weight].k_multiple),
        (entry.input, columns, OPERANDS[entry.input].k_multiple),
    ):
        if size % multiple:
            raise UserError(
                f"learner.tensor_parallel: {entry.name} would be cut into pieces of {size}, but {operand} has blocks "
                f"of {multiple}; lower tensor_parallel or leave this module in bf16"
            )
