"""Mixture of experts: router with replay, megatron's all-to-all, miniTE's grouped GEMMs and combine.

The routing probability multiplies an expert's output where the token lives, after the outputs came back: the rows
that travel are BF16, and the sum over a token's experts has one fixed order whatever the expert-parallel size.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.router import Router
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch import Tensor

from minite.backends.base import Fused
from minite.layers import ops
from minite.learner.precision import GroupedMatmul
from minite.learner.provider import PolicyConfig


class ReplayRouter(Router):
    """Top-k softmax router. ``replay_Tk`` (this rank's tokens) overrides its choice where it is not -1."""

    replay_Tk: Tensor | None = None  # set before each forward pass by PolicyModel
    fused: Fused | None = None  # set by precision.bind
    flips: Tensor | None = None  # int64 [2]: tokens that would have chosen other experts, tokens; None = not counted

    def routing(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        """Probabilities and choice as megatron's dispatcher wants them: two [T, E], zero / False where not chosen."""
        if self.flips is not None and self.replay_Tk is not None:
            self._count(logits_TE, self.replay_Tk)
        prob_Tk, expert_Tk = ops.route_topk(logits_TE, self.config.moe_router_topk, self.replay_Tk)
        chosen_TE = torch.zeros_like(logits_TE, dtype=torch.bool).scatter(1, expert_Tk, True)
        return torch.zeros_like(logits_TE).scatter(1, expert_Tk, prob_Tk), chosen_TE

    def _count(self, logits_TE: Tensor, replay_Tk: Tensor) -> None:
        own_Tk = ops.route_topk(logits_TE, self.config.moe_router_topk)[1]
        recorded_T = replay_Tk[:, 0] >= 0
        other_T = (own_Tk.sort(dim=1).values != replay_Tk.to(own_Tk.dtype).sort(dim=1).values).any(dim=1)
        self.flips = self.flips + torch.stack([(other_T & recorded_T).sum(), recorded_T.sum()])

    def forward(self, x: Tensor, padding_mask: None = None) -> tuple[Tensor, Tensor]:
        return self.routing(ops.wide_linear(x.flatten(0, 1), self.weight, self.config.strict, self.fused))


class CombiningDispatcher(MoEAlltoAllTokenDispatcher):
    """Megatron's all-to-all with miniTE's combine at the token's own rank."""

    fused: Fused | None = None  # set by precision.bind

    def dispatch_preprocess(self, hidden: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        rows_RH, self._prob_R = super().dispatch_preprocess(hidden, routing_map, probs)
        return rows_RH, self._prob_R.detach()  # the experts have no use for it

    def combine_postprocess(self, rows_RH: Tensor) -> Tensor:
        token_R = self.reversed_local_input_permutation_mapping
        num_tokens = self.hidden_shape_before_permute[0]
        combined = ops.moe_combine(rows_RH, self._prob_R, token_R, num_tokens, self.config.strict, self.fused)
        return combined.view(self.hidden_shape)


class ExpertWeight(torch.nn.Module):
    """One linear of all local experts: weight [experts, N, K] in one piece, so that a grouped GEMM needs no copy."""

    matmul: GroupedMatmul  # set by precision.bind

    def __init__(self, config: PolicyConfig, experts: int, n: int, k: int) -> None:
        super().__init__()
        weight_ENK = torch.empty(experts, n, k, dtype=config.params_dtype, device=config.device)
        self.weight = torch.nn.Parameter(weight_ENK)
        # Megatron reduces such gradients over the ranks that hold the same experts, TP ranks included. Without the
        # second mark its gradient norm would count the experts of one TP rank only.
        self.weight.allreduce = False
        self.weight.tensor_model_parallel = True

    def forward(self, x_RK: Tensor, rows_E: Tensor) -> Tensor:
        return self.matmul(x_RK, self.weight, rows_E.to(x_RK.device))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        axis = len(sharded_offsets)  # megatron may put a layer axis before ours
        ep = parallel_state.get_expert_model_parallel_rank(), parallel_state.get_expert_model_parallel_world_size()
        key = f"{prefix}weight"
        replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
        return {
            key: ShardedTensor.from_rank_offsets(
                key, self.weight, *sharded_offsets, (axis, *ep), replica_id=replica, prepend_axis_num=axis
            )
        }


class Experts(torch.nn.Module):
    """SwiGLU experts of this rank on rows sorted by expert."""

    def __init__(self, num_local_experts: int, config: PolicyConfig, pg_collection: Any = None) -> None:
        super().__init__()
        self.strict = config.strict
        hidden, wide = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = ExpertWeight(config, num_local_experts, 2 * wide, hidden)
        self.linear_fc2 = ExpertWeight(config, num_local_experts, hidden, wide)

    def forward(self, x_RH: Tensor, rows_E: Tensor, prob_R: Tensor) -> tuple[Tensor, None]:
        gate_up_RN = self.linear_fc1(x_RH, rows_E)
        fused = self.linear_fc1.matmul.backend.fused
        return self.linear_fc2(ops.swiglu(gate_up_RN, self.strict, fused), rows_E), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        parts = {}
        for name in ("linear_fc1", "linear_fc2"):
            parts |= getattr(self, name).sharded_state_dict(f"{prefix}{name}.", sharded_offsets, metadata)
        return parts


class MoE(MoELayer):
    """Megatron's MoE layer made of the parts above."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config, MoESubmodules(experts=Experts, router=ReplayRouter))
        self.token_dispatcher = CombiningDispatcher(
            self.num_local_experts, self.local_expert_indices, config, get_default_pg_collection()
        )
