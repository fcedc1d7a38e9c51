"""One process that is all of slime's training side: a gloo group of one, slime's arguments, the plugin's tiny model."""

from __future__ import annotations

import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import stand_ins

stand_ins.install(Path(sys.argv[1]), Path(sys.argv[2]))
stand_ins.install_actor()

from minite.learner import cpu_compat  # noqa: E402

cpu_compat.install("cpu")
cpu_compat.mute()

import torch  # noqa: E402
from megatron.core import parallel_state  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from slime.backends.megatron_utils import loss as slime_loss  # noqa: E402
from slime.backends.megatron_utils import megatron_to_hf  # noqa: E402
from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers  # noqa: E402

from minite.config import config_from_dict, config_to_dict, load_recipe, resolve_plan  # noqa: E402
from minite.errors import UserError  # noqa: E402
from minite.launch.slime_args import HOOKS, MODEL  # noqa: E402

RECIPES = Path(__file__).parents[2] / "recipes"
VOCAB = 32

DENSE = (
    "model.kind=qwen3", "model.intermediate_size=128", "model.num_experts=0", "model.experts_per_token=0",
    "model.moe_intermediate_size=0", "algo.router_replay=false",
    "precision.rules=[{layers: [0, -1], use: bf16}, {match: 'model.layers.**', use: w4a4}, {match: '**', use: bf16}]",
)  # fmt: skip
LENGTHS = [(4, 9), (3, 5), (2, 12)]  # (prompt, response) of a microbatch


def start(tensor_parallel: int = 1, expert_parallel: int = 1) -> None:
    """The process groups that slime's own initialize makes, of the ranks that the environment names."""
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        tensor_parallel,
        expert_model_parallel_size=expert_parallel,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=True,
    )
    model_parallel_cuda_manual_seed(0)


def slime_args(*overrides: str, **changes: Any) -> Namespace:
    """The part of slime's namespace that the code under test reads."""
    config = load_recipe(RECIPES / "tiny_qwen3_moe_w4a4_grpo.yaml", overrides)
    m, a = config.model, config.algo
    args = Namespace(
        minite={"recipe": config_to_dict(config), "plan_digest": resolve_plan(config).digest},
        vocab_size=VOCAB, padded_vocab_size=VOCAB, num_experts=m.num_experts, kv_channels=m.head_dim,
        num_attention_heads=m.num_heads, num_query_groups=m.num_kv_heads, hidden_size=m.hidden_size, q_lora_rank=None,
        rollout_temperature=1.0, rollout_top_p=1.0, log_probs_chunk_size=-1, allgather_cp=False,
        entropy_coef=a.entropy_coef,
        use_rollout_logprobs=False, use_opsm=False, use_tis=True, get_mismatch_metrics=True, advantage_estimator="grpo",
        eps_clip=a.clip_low, eps_clip_high=a.clip_high, eps_clip_c=a.dual_clip, use_kl_loss=a.kl_coef > 0,
        kl_loss_coef=a.kl_coef, kl_loss_type="k3", use_unbiased_kl=False, calculate_per_token_loss=True,
        recompute_loss_function=False, loss_type="policy_loss", save_debug_train_data=None,
        custom_loss_function_path="slime_plugin.loss.grpo", custom_model_provider_path=MODEL,
        custom_tis_function_path=HOOKS["--custom-tis-function-path"], save=None, load=None,
        use_rollout_routing_replay=True, sglang_router_ip=None,
    )  # fmt: skip
    for name, value in changes.items():
        setattr(args, name, value)
    return args


def random_weights(model: torch.nn.Module, seed: int = 0) -> None:
    """Every parameter set by the seed; norms near 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 0.1
            parameter.copy_(noise + 1 if parameter.dim() == 1 else noise)


def microbatch(lengths: list[tuple[int, int]], seed: int = 0) -> dict[str, Any]:
    """slime's batch of responses of (prompt, response) lengths, without log-probs; as slime's get_batch packs it."""
    generator = torch.Generator().manual_seed(seed)
    tokens = [torch.randint(0, VOCAB, (p + r,), generator=generator) for p, r in lengths]
    cu = torch.tensor([0, *torch.tensor([len(t) for t in tokens]).cumsum(0).tolist()], dtype=torch.int32)
    masks = [torch.ones(r, dtype=torch.int) for _, r in lengths]
    masks[0][-1] = 0  # a token that does not count
    return {
        "tokens": torch.cat(tokens)[None],
        "unconcat_tokens": tokens,
        "packed_seq_params": PackedSeqParams(qkv_format="thd", cu_seqlens_q=cu, cu_seqlens_kv=cu),
        "total_lengths": [p + r for p, r in lengths],
        "response_lengths": [r for _, r in lengths],
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "advantages": [torch.full((r,), a) for (_, r), a in zip(lengths, (1.5, -0.5, -1.0), strict=False)],
    }


def recipe(args: Any) -> tuple[Any, Any]:
    config = config_from_dict(args.minite["recipe"], "test")
    return config, resolve_plan(config)


def wrapped(model: torch.nn.Module) -> torch.nn.Module:
    """Under the two wrappers (DDP, Float16Module) that slime's names begin with."""
    for _ in range(2):
        outer = torch.nn.Module()
        outer.module, outer.config = model, model.config
        model = outer
    return model


def logits(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    """As slime calls the model."""
    result: torch.Tensor = model(
        input_ids=batch["tokens"], position_ids=None, attention_mask=None, labels=None,
        packed_seq_params=batch["packed_seq_params"], loss_mask=None,
    )  # fmt: skip
    return result


def log_probs(args: Any, model: torch.nn.Module, batch: dict[str, Any]) -> list[torch.Tensor]:
    lists = slime_loss.get_log_probs_and_entropy(
        logits(model, batch), args=args, unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"], response_lengths=batch["response_lengths"],
    )[1]  # fmt: skip
    return [x.detach() for x in lists["log_probs"]]


def refused(call: Any, expected: str) -> None:
    try:
        call()
    except UserError as error:
        assert expected in str(error), error
    else:
        raise AssertionError(f"not refused: {expected}")


def exported(args: Any, model: torch.nn.Module, quantization: Any) -> dict[str, torch.Tensor]:
    """What slime would send."""
    sent: dict[str, torch.Tensor] = {}
    for name, tensor in named_params_and_buffers(args, [wrapped(model)]):
        for hf_name, part in megatron_to_hf.convert_to_hf(args, "Qwen3MoeConfig", name, tensor.data, quantization):
            assert hf_name not in sent
            sent[hf_name] = part.clone()
    return sent
