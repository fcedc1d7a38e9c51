"""The learner's model inside slime: miniTE's modules under the parameter names that slime's converters know.

Of minite.learner.model it differs in four ways, all of them slime's terms: norms are fused into the linear behind them
by name, every expert is a parameter of its own, routing is replayed from slime's record, and logits stay split over
the vocabulary. Every number is computed by the same functions.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor

from minite.backends.registry import get_backend
from minite.config import RunConfig
from minite.errors import UserError
from minite.layers import ops
from minite.learner.model import policy_config
from minite.learner.moe import CombiningDispatcher, Experts, ReplayRouter
from minite.learner.precision import GroupedMatmul, bind
from minite.learner.provider import (
    ColumnLinear,
    DenseMLP,
    LogitsLinear,
    PackedParams,
    PolicyConfig,
    RowLinear,
    block_spec,
)
from slime_plugin.context import context


class NormColumnLinear(ColumnLinear):
    """RMS norm and column-parallel linear; the norm's weight is named as in Transformer Engine's fused module."""

    def __init__(self, input_size: int, output_size: int, *, config: PolicyConfig, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        weight_H = torch.ones(input_size, dtype=config.params_dtype, device=config.device)
        self.layer_norm_weight = torch.nn.Parameter(weight_H)
        self.layer_norm_weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        fused, eps = self.matmul.backend.fused, self.config.layernorm_epsilon
        normed = ops.rms_norm(x, self.layer_norm_weight, eps, self.config.strict, fused)
        return super().forward(normed, weight, runtime_gather_output)


class NormDenseMLP(DenseMLP):
    """SwiGLU MLP whose norm belongs to its first linear."""

    def __init__(self, config: PolicyConfig) -> None:
        submodules = MLPSubmodules(linear_fc1=NormColumnLinear, linear_fc2=RowLinear)
        MLP.__init__(self, config, submodules, ffn_hidden_size=config.ffn_hidden_size)


class SlimeRouter(ReplayRouter):
    """Router whose choice slime records, or replaces by the one that the sampler recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        from slime.utils.routing_replay import get_routing_replay_compute_topk, register_routing_replay

        self._choose = get_routing_replay_compute_topk(_topk)
        register_routing_replay(self)

    def routing(self, logits_TE: Tensor) -> tuple[Tensor, Tensor]:
        self.replay_Tk = self._choose(logits_TE, self.config.moe_router_topk)[1].long()
        return super().routing(logits_TE)


def _topk(logits_TE: Tensor, k: int, num_groups: None = None, group_topk: None = None) -> tuple[Tensor, Tensor]:
    """What slime replays or passes through: (probabilities, choice), as Megatron's own function returns them."""
    return ops.route_topk(logits_TE, k)


class NamedExperts(torch.nn.Module):
    """One linear of the experts of this rank: weight0, weight1, ... [N, K]."""

    matmul: GroupedMatmul  # set by precision.bind

    def __init__(self, config: PolicyConfig, experts: int, n: int, k: int) -> None:
        super().__init__()
        self.experts = experts
        for i in range(experts):
            weight_NK = torch.nn.Parameter(torch.empty(n, k, dtype=config.params_dtype, device=config.device))
            weight_NK.allreduce = False  # see minite.learner.moe.ExpertWeight
            set_tensor_model_parallel_attributes(weight_NK, is_parallel=True, dim=0, stride=1)  # slime reads them all
            self.register_parameter(f"weight{i}", weight_NK)

    def forward(self, x_RK: Tensor, rows_E: Tensor) -> Tensor:
        weights = [getattr(self, f"weight{i}") for i in range(self.experts)]
        return self.matmul(x_RK, weights, rows_E.to(x_RK.device))

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: Any = None) -> dict[str, Any]:
        """Every expert is a slice of one tensor [.., experts, N, K], whatever the expert-parallel size."""
        axis = len(sharded_offsets)
        first = parallel_state.get_expert_model_parallel_rank() * self.experts
        total = parallel_state.get_expert_model_parallel_world_size() * self.experts
        replica = (0, 0, parallel_state.get_expert_data_parallel_rank())
        return {
            f"{prefix}weight{i}": ShardedTensor.from_rank_offsets(
                f"{prefix}weight",
                getattr(self, f"weight{i}"),
                *sharded_offsets,
                (axis, first + i, total),
                replica_id=replica,
                prepend_axis_num=axis + 1,
            )
            for i in range(self.experts)
        }


class SlimeExperts(Experts):
    """SwiGLU experts of this rank, each a parameter of its own."""

    def __init__(self, num_local_experts: int, config: PolicyConfig, pg_collection: Any = None) -> None:
        torch.nn.Module.__init__(self)
        self.strict = config.strict
        hidden, wide = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = NamedExperts(config, num_local_experts, 2 * wide, hidden)
        self.linear_fc2 = NamedExperts(config, num_local_experts, hidden, wide)


class SlimeMoE(MoELayer):
    """Megatron's MoE layer made of the parts above."""

    def __init__(self, config: PolicyConfig) -> None:
        super().__init__(config, MoESubmodules(experts=SlimeExperts, router=SlimeRouter))
        self.token_dispatcher = CombiningDispatcher(
            self.num_local_experts, self.local_expert_indices, config, get_default_pg_collection()
        )


class SplitLogits(LogitsLinear):
    """Logits of this rank's part of the vocabulary: slime's log-probs reduce over it."""

    def forward(self, x: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None) -> Any:
        x = gather_from_sequence_parallel_region(x, group=self.tp_group)
        logits_TV = ops.wide_linear(x.flatten(0, 1), self.weight if weight is None else weight, self.config.strict)
        return (logits_TV if self.config.logits_dtype is None else logits_TV.to(self.config.logits_dtype))[
            :, None
        ], None


def slime_block_spec(config: PolicyConfig) -> TransformerBlockSubmodules:
    """minite.learner.provider's decoder with the parts above."""
    spec = block_spec(config)
    layer = spec.layer_specs[0]  # the one object that all layers share
    layer.submodules.input_layernorm = IdentityOp
    layer.submodules.self_attention.submodules.linear_qkv = NormColumnLinear
    if config.num_moe_experts is None:
        layer.submodules.pre_mlp_layernorm, layer.submodules.mlp = IdentityOp, NormDenseMLP
    else:
        layer.submodules.mlp = SlimeMoE
    return spec


class SlimePolicy(GPTModel):
    """From slime's packed tokens [1, T] to logits [1, T, V / TP]."""

    def __init__(self, config: PolicyConfig, run_config: RunConfig, vocab_size: int) -> None:
        m = run_config.model
        super().__init__(
            config,
            slime_block_spec(config),
            vocab_size=vocab_size,
            max_sequence_length=m.max_seq_len,
            share_embeddings_and_output_weights=m.tie_word_embeddings,
            position_embedding_type="none",  # PackedAttention rotates, exactly as the sampler does
        )
        self.output_layer = SplitLogits(  # Megatron hard-codes the class
            config.hidden_size,
            vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=m.tie_word_embeddings,
        )
        self._rope_theta = m.rope_theta

    def forward(self, input_ids: Tensor, packed_seq_params: Any, **_: Any) -> Tensor:
        """slime also passes position ids, an attention mask, labels (all None) and a loss mask that has no use here."""
        cu = packed_seq_params.cu_seqlens_q
        index_T = torch.arange(input_ids.numel(), device=input_ids.device)
        position_T = index_T - cu[torch.searchsorted(cu[1:], index_T, right=True)]
        cos_TD, sin_TD = ops.rope_cos_sin(position_T, self.config.kv_channels, self._rope_theta)
        packed = PackedParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cos_TD=cos_TD, sin_TD=sin_TD)
        logits: Tensor = super().forward(input_ids, None, None, packed_seq_params=packed)
        return logits


def provide(pre_process: bool = True, post_process: bool = True) -> SlimePolicy:
    """slime's --custom-model-provider-path. Raises UserError for a model that would be cut by layers."""
    from megatron.training import get_args

    args = get_args()
    if not (pre_process and post_process):
        raise UserError("--pipeline-model-parallel-size: the plugin's model is not cut by layers; set it to 1")
    return build(args)


def build(args: Any) -> SlimePolicy:
    """The model of slime's arguments, with the plan on its linears."""
    found = context(args)
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    config = policy_config(found.config, found.plan, device)
    model = SlimePolicy(config, found.config, args.padded_vocab_size)
    backend = get_backend(found.plan.backend, device=device, strict=False)
    bind(model, found.plan, backend, parallel_state.get_tensor_model_parallel_group())
    return model
