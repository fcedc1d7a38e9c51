"""What `minite launch` does not start: recipes that slime cannot run, and arguments that contradict the plan."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from minite.config import PrecisionPlan, RunConfig
from minite.errors import UserError
from minite.launch.reads import check_unread
from minite.sync.modelopt import quantization_config

KINDS = ("qwen3", "qwen3_moe")  # model kinds whose parameter names the plugin gives slime

# Arguments that `slime.extra` must not hold although the recipe sets none of them, and why.
FORBIDDEN = {
    "--te-precision-config-file": "it could give evaluation another recipe than training; set precision.rules",
    "--fp4-format": "precision.formats decides",
    "--fp4-recipe": "precision.formats decides",
    "--fp8-format": "precision.formats decides",
    "--fp8-recipe": "precision.formats decides",
    "--first-last-layers-bf16": "precision.rules decide: {layers: [0, -1], use: bf16}",
    "--sglang-quantization": "the checkpoint says it, made by minite convert from the same plan",
    "--custom-config-path": "minite launch writes that file",
    "--train-env-vars": "minite launch writes them from the plan",
    "--loss-type": "TRIAGE is in slime's policy loss; the hook for another loss is slime_plugin.loss.grpo",
    "--use-rollout-logprobs": "it takes the learner's old log-probs away, and with them the gap",
    "--context-parallel-size": "TRIAGE needs whole responses on a rank",
    "--pipeline-model-parallel-size": "the plugin's model is not cut by layers",
    "--only-train-params-name-list": "an engine would process weights again that were not sent",
    "--freeze-params-name-list": "an engine would process weights again that were not sent",
    "--update-weight-mode": "byte deltas are not checked against the plan",
}


def check(config: RunConfig, plan: PrecisionPlan, decided: Collection[str]) -> None:
    """Raises UserError for the first thing slime could not do as the recipe says. ``decided``: flags of the recipe."""
    _check_recipe(config, plan)
    check_unread(config)
    _check_layout(config)
    _check_extra(config, decided)
    _check_inputs(config, plan)
    if config.slime.quantization == "minite":
        _check_own_engine(config, plan)
    elif any(entry.quantized for entry in plan):
        quantization_config(plan)  # refuses what SGLang's loaders cannot be told


def _check_recipe(config: RunConfig, plan: PrecisionPlan) -> None:
    for path, got, expected, why in (
        ("model.kind", config.model.kind, KINDS, "the plugin has no slime names for its parameters"),
        ("model.dtype", config.model.dtype, ("bf16",), "slime trains in BF16 with FP32 masters"),
        ("sampler.kind", config.sampler.kind, ("sglang",), "slime's engines are SGLang"),
        ("sampler.transport", config.sampler.transport, ("packed",), "slime's updater sends what it has quantized"),
        ("data.kind", config.data.kind, ("jsonl",), "slime reads a file of prompts"),
        ("data.reward", config.data.reward, ("task",), "slime.reward is the reward there"),
        ("warm_start.steps", config.warm_start.steps, (0,), "slime has no warm start; give model.checkpoint"),
        ("monitor.watch", config.monitor.watch, ((),), "nothing there watches a run or stops it"),
        ("driver.ahead", config.driver.ahead, (0,), "train.py does not sample ahead"),
        ("correction.unhealthy", config.correction.unhealthy, ("warn", "stop"), "slime cannot skip a step"),
        ("driver.prometheus_port", config.driver.prometheus_port, (None,), "slime has its own: slime.extra"),
        ("driver.wandb", config.driver.wandb, (False,), "slime has its own: slime.extra: [--use-wandb]"),
        ("precision.alignment", plan.alignment, ("off", "aligned"), "SGLang's sums have no fixed order"),
    ):
        if got not in expected:
            words = " or ".join("[]" if one == () else str(one) for one in expected)
            raise UserError(f"{config.where(path)}: {path} is {got!r}, but minite launch needs {words}: {why}")
    theta = config.model.rope_theta
    if theta != int(theta):
        raise UserError(
            f"{config.where('model.rope_theta')}: model.rope_theta is {theta!r}, but Megatron's --rotary-base takes "
            "whole numbers only"
        )
    if config.model.checkpoint is None:
        raise UserError("model.checkpoint: not set; slime starts from a BF16 Hugging Face directory, set it")


def _check_inputs(config: RunConfig, plan: PrecisionPlan) -> None:
    """SGLang's NVFP4 experts scale their inputs by token, its other NVFP4 linears by one number of the checkpoint."""
    dense = next((e for e in plan if e.input != "bf16" and ".experts." not in e.name), None)
    native = config.slime.quantization == "modelopt"
    if native and plan.alignment == "aligned" and dense is not None:
        raise UserError(
            f"{config.where('precision.alignment')}: precision.alignment is aligned, but {dense.name} ({dense.rule}) "
            f"has input {dense.input}: SGLang's own NVFP4 linears cannot scale by token, only its experts; "
            "leave other linears in bf16, set precision.alignment: off, or slime.quantization: minite"
        )


def _check_own_engine(config: RunConfig, plan: PrecisionPlan) -> None:
    for path, got, expected, why in (
        ("slime.checkpoint", config.slime.checkpoint, None, "the engines start from the launch directory"),
        ("slime.gpus_per_engine", config.slime.gpus_per_engine, 1, "slime's buckets are not cut for our method"),
        ("driver.placement", config.driver.placement, "colocated", "only that updater of slime's carries our messages"),
        ("precision.backend", plan.backend == "te", False, "Transformer Engine is no backend of an engine"),
    ):
        if got != expected:
            raise UserError(
                f"{config.where(path)}: {path} is {got!r} beside slime.quantization: minite, expected {expected!r}: "
                f"{why}"
            )


def _check_layout(config: RunConfig) -> None:
    x, s = config.learner, config.slime
    gpus = s.nodes * s.gpus_per_node
    if x.world_size != gpus:
        raise UserError(
            f"{config.where('learner.tensor_parallel')}: the learner has tensor_parallel {x.tensor_parallel} x "
            f"{x.data_ranks} data ranks = {x.world_size} processes, but slime starts one on each of {gpus} GPUs "
            f"(slime.nodes x slime.gpus_per_node); set learner.data_parallel: {gpus // x.tensor_parallel}"
        )
    engines = config.sampler.count * s.gpus_per_engine
    if config.driver.placement == "colocated" and engines != gpus:
        raise UserError(
            f"{config.where('sampler.count')}: sampler.count {config.sampler.count} x slime.gpus_per_engine "
            f"{s.gpus_per_engine} = {engines} GPUs, but colocated engines take all {gpus}; "
            f"set sampler.count: {gpus // s.gpus_per_engine}"
        )


def _check_extra(config: RunConfig, decided: Collection[str]) -> None:
    for word in config.slime.extra:
        flag = word.partition("=")[0]
        why = FORBIDDEN.get(flag, "the recipe decides it" if flag in decided else None)
        if why is not None:
            raise UserError(f"{config.where('slime.extra')}: slime.extra has {flag}: {why}; remove it")


def check_checkpoint(directory: Path, plan: PrecisionPlan) -> None:
    """The directory that the engines start from holds what the plan says. Raises UserError naming the first difference.

    slime sends BF16 for every quant_method that it does not know, without a word; such a directory is refused here.
    """
    file = directory / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8")).get("quantization_config")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"slime.checkpoint: {file} is not readable ({error}); make it with minite convert") from None
    expected = quantization_config(plan) if any(entry.quantized for entry in plan) else None
    remedy = "make it with minite convert and this recipe"
    if (found is None) != (expected is None):
        what = "holds BF16, but the plan quantizes" if found is None else "is quantized, but the plan is BF16"
        raise UserError(f"slime.checkpoint: {directory} {what}; {remedy}")
    if expected is None:
        return
    for key, want in expected.items():
        if found.get(key) != want:
            raise UserError(
                f"slime.checkpoint: {file} does not hold this plan: quantization_config.{key} "
                f"{_difference(found.get(key), want)}; {remedy}"
            )


def _difference(found: object, want: object) -> str:
    """How two values differ; of lists, the first element that only one of them has."""
    if not isinstance(found, list) or not isinstance(want, list):
        return f"is {found!r}, the plan needs {want!r}"
    surplus, missing = [x for x in found if x not in want], [x for x in want if x not in found]
    if surplus:
        return f"has {surplus[0]!r}, the plan has not"
    return f"lacks {missing[0]!r}" if missing else "has another order"
