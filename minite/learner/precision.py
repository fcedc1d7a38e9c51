"""The precision plan -> the linears of a built model: which operands, which backend, which amax is shared over TP.

Megatron fuses q, k, v into one matrix and gate, up into another. Such a matrix is one fusion group of the plan: one
amax of the whole, reduced over the ranks that hold shards, so that every rank makes the codes of the unsharded matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor

from minite.backends.base import Backend
from minite.config import PlanEntry, PrecisionPlan
from minite.errors import UserError
from minite.layers.grouped_matmul import quant_grouped_matmul
from minite.layers.matmul import AmaxHooks, quant_matmul
from minite.layers.weight_cache import WeightCache


@dataclass
class Matmul:
    """One quantized linear, weight passed at call time: x [M, K], w [N, K] -> [M, N] in ``out_dtype``."""

    name: str
    entry: PlanEntry
    backend: Backend
    hooks: AmaxHooks
    cache: WeightCache = field(default_factory=WeightCache)

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

    def __call__(self, x_RK: Tensor, w_ENK: Tensor, rows_E: Tensor) -> Tensor:
        return quant_grouped_matmul(x_RK, w_ENK, rows_E, self.entry, self.backend, self.cache, name=self.name)


def bind(model: GPTModel, plan: PrecisionPlan, backend: Backend, tp_group: torch.distributed.ProcessGroup) -> None:
    """Give every linear of ``model`` its part of the plan. Raises UserError where one matrix has mixed decisions."""

    def shared_max(amax: Tensor) -> Tensor:
        if tp_group.size() > 1:
            torch.distributed.all_reduce(amax, torch.distributed.ReduceOp.MAX, group=tp_group)
        return amax

    rows_split = AmaxHooks(reduce_weight_amax=shared_max)  # every rank has all of K and so the whole input
    columns_split = AmaxHooks(reduce_weight_amax=shared_max, reduce_input_amax=shared_max)
    for i, layer in enumerate(model.decoder.layers):
        attn, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        qkv = _fused(plan, [f"{attn}.{x}_proj" for x in "qkv"])
        layer.self_attention.linear_qkv.matmul = Matmul(f"{attn}.qkv_proj", qkv, backend, rows_split)
        o_proj = Matmul(f"{attn}.o_proj", plan[f"{attn}.o_proj"], backend, columns_split)
        layer.self_attention.linear_proj.matmul = o_proj
        if model.config.num_moe_experts is None:
            fc1 = _fused(plan, [f"{mlp}.gate_proj", f"{mlp}.up_proj"])
            layer.mlp.linear_fc1.matmul = Matmul(f"{mlp}.gate_up_proj", fc1, backend, rows_split)
            down = Matmul(f"{mlp}.down_proj", plan[f"{mlp}.down_proj"], backend, columns_split)
            layer.mlp.linear_fc2.matmul = down
        else:
            experts = [f"{mlp}.experts.{e}" for e in range(model.config.num_moe_experts)]
            fc1 = _alike([_fused(plan, [f"{e}.gate_proj", f"{e}.up_proj"]) for e in experts])
            fc2 = _alike([plan[f"{e}.down_proj"] for e in experts])
            layer.mlp.experts.linear_fc1.matmul = GroupedMatmul(f"{mlp}.experts.gate_up_proj", fc1, backend)
            layer.mlp.experts.linear_fc2.matmul = GroupedMatmul(f"{mlp}.experts.down_proj", fc2, backend)


def _alike(entries: list[PlanEntry]) -> PlanEntry:
    """The decision that modules computed in one GEMM share."""
    first = entries[0]
    for e in entries[1:]:
        if (e.weight, e.input, e.dgrad, e.wgrad) != (first.weight, first.input, first.dgrad, first.wgrad):
            raise UserError(
                f"precision.rules: {first.name} is {first.format} ({first.rule}), {e.name} is {e.format} ({e.rule}), "
                "but the learner computes them in one GEMM; give both the same format"
            )
    return first


def _fused(plan: PrecisionPlan, names: list[str]) -> PlanEntry:
    """The decision of modules that megatron holds as one matrix, hence with one outer scale."""
    entries = [plan[name] for name in names]
    if entries[0].weight.startswith("nvfp4") and len({e.group for e in entries} - {None}) != 1:
        leaves = ", ".join(name.rpartition(".")[2] for name in names)
        raise UserError(
            f"precision.fused: {names[0]} and its siblings are quantized apart, but the learner holds them as one "
            f"matrix; add [{leaves}] to precision.fused"
        )
    return _alike(entries)
