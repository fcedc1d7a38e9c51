"""Recipe -> the words after ``python3 train.py``. One function per concern; slime's names left, ours right.

A value of None leaves the flag out, True writes the flag alone, a tuple writes several words.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from minite.config import PrecisionPlan, RunConfig
from minite.models import get_model

Value = str | int | float | bool | tuple[str, ...] | None
Flags = dict[str, Value]

# Hooks that slime loads by name: minite never imports the plugin.
MODEL = "slime_plugin.model.provide"
HOOKS: Flags = {
    "--custom-megatron-init-path": "slime_plugin.hooks.init",
    "--custom-megatron-before-log-prob-hook-path": "slime_plugin.hooks.before_log_prob",
    "--custom-megatron-before-train-step-hook-path": "slime_plugin.hooks.before_train_step",
    "--rollout-data-postprocess-path": "slime_plugin.hooks.postprocess",
    "--custom-tis-function-path": "slime_plugin.loss.correct_loss",
    "--get-mismatch-metrics": True,  # old log-probs are computed before training, so the gap can be measured on them
}


def slime_arguments(config: RunConfig, plan: PrecisionPlan) -> Flags:
    """Every argument that the recipe decides, but those that name files of the launch directory."""
    parts = (
        _model(config),
        _layout(config),
        _checkpoints(config),
        _data(config),
        _algorithm(config),
        _optimizer(config),
        _precision(config, plan),
        _engine(config, plan),
        HOOKS,
    )
    flags: Flags = {}
    for part in parts:
        assert not flags.keys() & part.keys(), flags.keys() & part.keys()
        flags |= part
    return {flag: value for flag, value in flags.items() if value is not None and value is not False}


def words(flags: Mapping[str, Value]) -> list[str]:
    """The flags as command-line words."""
    result: list[str] = []
    for flag, value in flags.items():
        result.append(flag)
        if value is not True:
            result += list(value) if isinstance(value, tuple) else [_text(value)]
    return result


def _text(value: Value) -> str:
    return format(value, ".12g") if isinstance(value, float) else str(value)


def _path(path: str | None) -> str | None:
    """Absolute: a Ray job runs in a directory of its own."""
    return None if path is None else str(Path(path).resolve())


def _model(config: RunConfig) -> Flags:
    m = config.model
    flags: Flags = {
        "--num-layers": m.num_layers,
        "--hidden-size": m.hidden_size,
        "--ffn-hidden-size": m.intermediate_size or m.moe_intermediate_size,
        "--num-attention-heads": m.num_heads,
        "--group-query-attention": True,
        "--num-query-groups": m.num_kv_heads,
        "--kv-channels": m.head_dim,
        "--vocab-size": m.vocab_size,
        "--max-position-embeddings": m.max_seq_len,
        "--seq-length": m.max_seq_len,
        "--position-embedding-type": "rope",
        "--rotary-base": int(m.rope_theta),
        "--normalization": "RMSNorm",
        "--norm-epsilon": m.rms_norm_eps,
        "--swiglu": True,
        "--disable-bias-linear": True,
        "--qk-layernorm": get_model(m.kind).qk_norm,
        "--untie-embeddings-and-output-weights": not m.tie_word_embeddings,
        "--attention-dropout": "0.0",
        "--hidden-dropout": "0.0",
    }
    if m.num_experts:
        flags |= {
            "--num-experts": m.num_experts,
            "--moe-ffn-hidden-size": m.moe_intermediate_size,
            "--moe-router-topk": m.experts_per_token,
            "--moe-router-score-function": "softmax",
            "--moe-router-dtype": "fp32",
            "--moe-router-load-balancing-type": "none",
            "--moe-token-dispatcher-type": "alltoall",
            "--moe-aux-loss-coeff": "0",
        }
    return flags


def _layout(config: RunConfig) -> Flags:
    x, s = config.learner, config.slime
    flags: Flags = {
        "--actor-num-nodes": s.nodes,
        "--actor-num-gpus-per-node": s.gpus_per_node,
        "--num-gpus-per-node": s.gpus_per_node,
        "--rollout-num-gpus-per-engine": s.gpus_per_engine,
        "--tensor-model-parallel-size": x.tensor_parallel,
        "--sequence-parallel": x.tensor_parallel > 1,
        "--expert-model-parallel-size": x.expert_parallel,
        "--expert-tensor-parallel-size": 1,
        "--use-dynamic-batch-size": True,
        "--max-tokens-per-gpu": x.tokens_per_microbatch,
    }
    if config.driver.placement == "colocated":
        flags["--colocate"] = True
    else:
        flags["--rollout-num-gpus"] = config.sampler.count * s.gpus_per_engine
    if x.recompute:
        flags |= {"--recompute-granularity": "full", "--recompute-method": "uniform", "--recompute-num-layers": 1}
    return flags


def _checkpoints(config: RunConfig) -> Flags:
    """Without a checkpoint under --load slime starts from --ref-load, which must be BF16: it cannot read NVFP4."""
    own = config.slime.quantization == "minite"  # the engines start from the launch directory
    return {
        "--hf-checkpoint": None if own else _path(config.slime.checkpoint or config.model.checkpoint),
        "--ref-load": _path(config.model.checkpoint),
        "--load": _path(config.slime.save),
        "--save": _path(config.slime.save),
        "--save-interval": config.driver.checkpoint_every,
    }


def _data(config: RunConfig) -> Flags:
    s, d = config.sampler, config.driver
    reward = "--custom-rm-path" if "." in config.slime.reward else "--rm-type"
    flags: Flags = {
        "--prompt-data": _path(config.data.path),
        "--input-key": "prompt",
        "--label-key": "answer",
        "--apply-chat-template": config.data.chat_template,
        "--rollout-shuffle": True,
        "--rollout-seed": config.seed,
        reward: config.slime.reward,
        "--num-rollout": d.steps,
        "--rollout-temperature": s.temperature,
        "--rollout-top-p": s.top_p if s.top_p != 1 else None,
        "--rollout-top-k": s.top_k or None,
        "--rollout-max-response-len": s.max_new_tokens,
        "--rollout-max-context-len": config.model.max_seq_len,
        "--balance-data": True,
    }
    if config.slime.eval_data is not None:
        flags |= {
            "--eval-interval": d.eval_every,
            "--eval-prompt-data": ("heldout", str(_path(config.slime.eval_data))),
            "--eval-temperature": d.eval_temperature,
            "--eval-max-response-len": s.max_new_tokens,
        }
    if d.tensorboard:
        flags |= {
            "--use-tensorboard": True,
            "--tb-project-name": _path(config.slime.save),
            "--tb-experiment-name": config.name,
        }
    return flags


def _algorithm(config: RunConfig) -> Flags:
    a = config.algo
    flags: Flags = {
        "--advantage-estimator": "grpo",
        "--disable-grpo-std-normalization": not a.normalize_std,
        "--rollout-batch-size": a.prompts_per_step,
        "--n-samples-per-prompt": a.group_size,
        "--num-steps-per-rollout": a.minibatches,
        "--eps-clip": a.clip_low,
        "--eps-clip-high": a.clip_high,
        "--eps-clip-c": a.dual_clip,
        "--entropy-coef": a.entropy_coef,
        "--calculate-per-token-loss": True,  # the token mean over the global batch
        "--use-tis": True,
        "--use-rollout-routing-replay": a.router_replay and config.model.num_experts > 0,
    }
    if a.kl_coef:
        flags |= {"--use-kl-loss": True, "--kl-loss-coef": a.kl_coef, "--kl-loss-type": "k3"}
    if a.drop_flat_groups:
        name = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
        flags["--dynamic-sampling-filter-path"] = name
    return flags


def _optimizer(config: RunConfig) -> Flags:
    x = config.learner
    flags: Flags = {
        "--optimizer": "adam",
        "--lr": x.lr,
        "--lr-decay-style": "constant",
        "--lr-warmup-iters": x.warmup_steps,
        "--weight-decay": x.weight_decay,
        "--adam-beta1": x.beta1,
        "--adam-beta2": x.beta2,
        "--clip-grad": x.clip_grad,
        "--seed": config.seed,
        "--accumulate-allreduce-grads-in-fp32": True,
    }
    if x.min_lr is not None:
        updates = config.driver.steps * config.algo.minibatches
        flags |= {"--lr-decay-style": "linear", "--min-lr": x.min_lr, "--lr-decay-iters": updates}
    if config.slime.offload_optimizer:
        flags |= {"--optimizer-cpu-offload": True, "--overlap-cpu-optimizer-d2h-h2d": True}
        flags["--use-precision-aware-optimizer"] = True
    return flags


def _precision(config: RunConfig, plan: PrecisionPlan) -> Flags:
    """Who computes the learner's linears: miniTE's own model, or megatron's modules on Transformer Engine."""
    if plan.backend != "te":
        return {
            "--custom-model-provider-path": MODEL,
            "--transformer-impl": "local",
            "--no-gradient-accumulation-fusion": True,
            "--no-rope-fusion": True,
        }
    flags: Flags = {"--transformer-impl": "transformer_engine"}
    if any(entry.quantized for entry in plan):
        flags |= {"--fp4-format": "e2m1", "--fp4-recipe": "nvfp4"}
    if config.model.num_experts:
        flags |= {"--moe-grouped-gemm": True, "--moe-permute-fusion": True}
    return flags


def _engine(config: RunConfig, plan: PrecisionPlan) -> Flags:
    native = config.slime.quantization == "modelopt"
    experts = native and any(".experts." in entry.name and entry.input.startswith("nvfp4") for entry in plan)
    return {
        "--sglang-mem-fraction-static": config.slime.memory_fraction,
        "--sglang-max-running-requests": config.sampler.max_batch,
        "--sglang-kv-cache-dtype": "fp8_e4m3" if plan.kv_cache == "fp8" else "auto",
        "--sglang-enable-fp32-lm-head": plan.lm_head_dtype == "fp32",
        # The runner that scales inputs by token and still tells which experts it chose.
        "--sglang-moe-runner-backend": "flashinfer_trtllm_routed" if experts else None,
    }
