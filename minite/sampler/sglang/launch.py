"""How SGLang is started for a recipe: its model directory and its launch options, derived from config and plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minite.config.plan import PrecisionPlan
from minite.config.schema import RunConfig
from minite.errors import UserError
from minite.models.hf_config import write_hf_config
from minite.sampler.sglang.names import METHOD

PLAN_FILE = "plan.json"
LOADER = "minite.sampler.sglang.inside.load"  # SGLang's name for our weight loader is its import path
MAX_GRAPH_BATCH = 256  # requests; larger batches gain nothing from a graph, and each size costs a capture
_KV_CACHE = {"bf16": "auto", "fp8": "fp8_e4m3"}  # auto: the model's dtype


def check(config: RunConfig, device: str) -> None:
    """Raises UserError for a recipe that SGLang cannot run as it says, in one line."""
    precision = config.precision
    if precision.alignment == "strict":
        raise UserError(
            f"{config.where('precision.alignment')}: alignment: strict needs sums that do not depend on the batch, "
            "which SGLang has not; use -o sampler=embedded, or alignment: aligned"
        )
    if precision.kv_cache == "fp8" and device == "cpu":
        raise UserError(
            f"{config.where('precision.kv_cache')}: kv_cache: fp8 needs a GPU with SGLang; "
            "use -o sampler=embedded, or kv_cache: bf16"
        )


def model_files(config: RunConfig, plan: PrecisionPlan, device: str, directory: Path) -> dict[str, str]:
    """Name -> text of what SGLang is started on: the plan and a config.json that points at it in ``directory``.

    ``quantization_config`` is the one way by which the plan reaches the scheduler processes. There are no weights.
    """
    quantization = {"quant_method": METHOD, "plan": str(directory / PLAN_FILE), "device": device}
    content = {**write_hf_config(config.model), "quantization_config": quantization}
    return {PLAN_FILE: plan.to_json(), "config.json": json.dumps(content, indent=1)}


def arguments(config: RunConfig, plan: PrecisionPlan, device: str, directory: Path) -> dict[str, Any]:
    """Keyword arguments of sglang.Engine."""
    model, sampler = config.model, config.sampler
    options: dict[str, Any] = {
        "model_path": str(directory),
        "load_format": "dummy",  # weights come from the learner, or not at all
        "skip_tokenizer_init": True,  # tokens in, tokens out
        "quantization": METHOD,
        "custom_weight_loader": [LOADER],
        "sampling_backend": "pytorch",  # draw.py draws; this one needs no other package
        "grammar_backend": "none",
        "dtype": {"bf16": "bfloat16", "fp32": "float32"}[model.dtype],
        "kv_cache_dtype": _KV_CACHE[plan.kv_cache],
        "enable_fp32_lm_head": plan.lm_head_dtype == "fp32",
        "enable_return_routed_experts": bool(model.num_experts),
        "max_total_tokens": sampler.kv_tokens,
        "max_running_requests": sampler.max_batch,
        "tp_size": sampler.tensor_parallel,
        "context_length": model.max_seq_len,
        "random_seed": config.seed,
        "log_level": "error",
    }
    return options | (_CPU if device == "cpu" else _gpu(plan, sampler.max_batch))


_CPU: dict[str, Any] = {
    "device": "cpu",
    "attention_backend": "torch_native",
    "mem_fraction_static": 0.1,  # of the machine's memory; what counts is max_total_tokens
    "disable_overlap_schedule": True,
}


def _gpu(plan: PrecisionPlan, max_batch: int) -> dict[str, Any]:
    """Triton attention runs wherever triton does; deterministic mode fixes the order of its sums."""
    return {
        "device": "cuda",
        "attention_backend": "triton",
        "moe_runner_backend": "triton",
        "disable_prefill_cuda_graph": True,  # it would have to compile our layers; decode steps are what graphs are for
        "cuda_graph_max_bs_decode": min(max_batch, MAX_GRAPH_BATCH),
        "enable_deterministic_inference": plan.alignment == "aligned",
    }
