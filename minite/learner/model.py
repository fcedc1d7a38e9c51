"""A recipe's model as megatron's GPTModel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel import scatter_to_sequence_parallel_region
from torch import Tensor

from minite.config import PrecisionPlan, RunConfig
from minite.layers import ops
from minite.learner.moe import ReplayRouter
from minite.learner.packing import Microbatch
from minite.learner.provider import LogitsLinear, PackedParams, PolicyConfig, block_spec
from minite.models import get_model
from minite.sync.stored import MODEL_DTYPES


def policy_config(run_config: RunConfig, plan: PrecisionPlan, device: torch.device) -> PolicyConfig:
    """Megatron's settings for a recipe. What is not named here is megatron's default or unused by our modules."""
    m, layout = run_config.model, run_config.learner
    dtype, strict, moe = MODEL_DTYPES[m.dtype], plan.alignment == "strict", m.num_experts > 0
    return PolicyConfig(
        num_layers=m.num_layers,
        hidden_size=m.hidden_size,
        num_attention_heads=m.num_heads,
        num_query_groups=m.num_kv_heads,
        kv_channels=m.head_dim,
        ffn_hidden_size=m.intermediate_size or m.moe_intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=m.rms_norm_eps,
        qk_layernorm=get_model(m.kind).qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        num_moe_experts=m.num_experts if moe else None,
        moe_ffn_hidden_size=m.moe_intermediate_size if moe else None,
        moe_router_topk=m.experts_per_token if moe else 2,
        moe_router_load_balancing_type="none",
        moe_token_dispatcher_type="alltoall",
        tensor_model_parallel_size=layout.tensor_parallel,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=1,
        sequence_parallel=layout.tensor_parallel > 1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        gradient_accumulation_fusion=False,  # needs an extension of Apex
        calculate_per_token_loss=True,  # gradients are summed over ranks: the loss is divided by the global token count
        recompute_granularity="full" if layout.recompute else None,
        recompute_method="uniform" if layout.recompute else None,
        recompute_num_layers=1 if layout.recompute else None,
        device=device,
        strict=strict,
        logits_dtype=None if plan.lm_head_dtype == "fp32" else torch.bfloat16,
    )


class PolicyModel(GPTModel):
    """GPTModel with miniTE's modules, from packed tokens to log-probs."""

    def __init__(self, config: PolicyConfig, run_config: RunConfig) -> None:
        m = run_config.model
        super().__init__(
            config,
            block_spec(config),
            vocab_size=m.vocab_size,
            max_sequence_length=m.max_seq_len,
            share_embeddings_and_output_weights=m.tie_word_embeddings,
            position_embedding_type="none",  # PackedAttention rotates, exactly as the sampler does
        )
        # Megatron hard-codes the class of the output layer.
        self.output_layer = LogitsLinear(
            config.hidden_size,
            m.vocab_size,
            config=config,
            init_method=config.init_method,
            bias=False,
            skip_weight_param_allocation=m.tie_word_embeddings,
        )
        self._rope_theta = m.rope_theta
        self._routers = [module for module in self.modules() if isinstance(module, ReplayRouter)]

    def token_logprobs(self, batch: Microbatch, temperature: float, entropy: bool) -> tuple[Tensor, Tensor | None]:
        """(logprob_T, entropy_T) of the microbatch: value t speaks of token t and is 0 at first tokens. [nats]

        FP32, FP64 in strict mode. ``entropy`` False saves a pass over the vocabulary and returns None.
        """
        self._set_replay(batch.replay_TLk)
        logits_TV = self(batch.tokens_T[None], None, None, packed_seq_params=self._packed(batch))[0]
        logprob_TV = ops.log_softmax(logits_TV, self.config.strict, temperature)
        picked_T = logprob_TV[:-1].gather(-1, batch.tokens_T[1:, None]).squeeze(-1)
        shifted = [picked_T, ops.entropy(logprob_TV[:-1])] if entropy else [picked_T]
        # Row t of the logits predicts token t + 1.
        values = [F.pad(x, (1, 0)).masked_fill(batch.first_T, 0.0) for x in shifted]
        return values[0], values[1] if entropy else None

    @contextmanager
    def counted_flips(self) -> Iterator[Tensor]:
        """Within the block replayed routers count. Yields int64 [2], full at its end: see ReplayRouter.flips."""
        device = self.config.device
        total = torch.zeros(2, dtype=torch.int64, device=device)
        for router in self._routers:
            router.flips = torch.zeros(2, dtype=torch.int64, device=device)
        try:
            yield total
        finally:
            for router in self._routers:
                total += router.flips
                router.flips = None

    def weights_changed(self) -> None:
        """Forget quantized weights. To be called after every write to parameters: torch cannot see megatron's."""
        for module in self.modules():
            if hasattr(module, "matmul"):
                module.matmul.cache.invalidate()

    def _packed(self, batch: Microbatch) -> PackedParams:
        cos_TD, sin_TD = ops.rope_cos_sin(batch.position_T, self.config.kv_channels, self._rope_theta)
        cu = batch.cu_seqlens
        return PackedParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu, cos_TD=cos_TD, sin_TD=sin_TD)

    def _set_replay(self, replay_TLk: Tensor | None) -> None:
        if replay_TLk is None:
            parts = [None] * len(self._routers)
        else:
            local_tLk = scatter_to_sequence_parallel_region(replay_TLk) if self.config.sequence_parallel else replay_TLk
            parts = list(local_tLk.unbind(1))
        for router, replay_Tk in zip(self._routers, parts, strict=True):
            router.replay_Tk = replay_Tk
