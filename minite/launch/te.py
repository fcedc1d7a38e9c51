"""Backend ``te``: the plan as Transformer Engine's choices, for megatron's --te-precision-config-file. Data only.

Compiled and checked without Transformer Engine; the numbers are Transformer Engine's own. What makes them those of the
plan (row-scaled inputs, no random Hadamard transform, exact math, ...) are the variables of config.env.third_party_env.
"""

from __future__ import annotations

import re
from typing import Any

from minite.config import PlanEntry, PrecisionPlan
from minite.errors import UserError

# Operands that NVFP4BlockScaling computes under third_party_env. Four over six needs a newer release than slime pins.
WEIGHTS = ("nvfp4_1d", "nvfp4_2d")
INPUTS = ("nvfp4_row", "nvfp4_tensor")

# HF linear -> the megatron module that computes it. All experts of a layer are one grouped module.
_MODULES = (
    (re.compile(r"model\.layers\.(\d+)\.self_attn\.[qkv]_proj"), "self_attention.linear_qkv"),
    (re.compile(r"model\.layers\.(\d+)\.self_attn\.o_proj"), "self_attention.linear_proj"),
    (re.compile(r"model\.layers\.(\d+)\.mlp\.(?:gate|up)_proj"), "mlp.linear_fc1"),
    (re.compile(r"model\.layers\.(\d+)\.mlp\.down_proj"), "mlp.linear_fc2"),
    (re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.(?:gate|up)_proj"), "mlp.experts.linear_fc1"),
    (re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.\d+\.down_proj"), "mlp.experts.linear_fc2"),
)


def precision_file(plan: PrecisionPlan) -> dict[str, Any]:
    """The content of the file. Raises UserError for what Transformer Engine cannot do.

    No ``evaluation_recipe``: slime computes old log-probs in evaluation mode, and they must be those of training.
    """
    modules: dict[str, PlanEntry] = {}
    for entry in plan:
        _check(entry)
        if (module := megatron_module(entry.name)) is not None:
            modules[module] = entry
    return {
        "configs": {
            "nvfp4": _recipe({"fp4_quantization_recipe": "nvfp4", "override_nonquantized_autocast": True}),
            "bf16": _recipe({}),
        },
        "matchers": {
            # A glob of the whole name behind a dot: what stands before differs between megatron's wrappers.
            **{name: _matcher(f"*{name}", "nvfp4") for name, entry in modules.items() if entry.quantized},
            "rest": _matcher("*", "bf16"),
        },
    }


def megatron_module(name: str) -> str | None:
    """``decoder.layers.3.mlp.linear_fc1`` for an HF linear; None for the router and lm_head, which TE does not own."""
    for pattern, module in _MODULES:
        if (match := pattern.fullmatch(name)) is not None:
            return f"decoder.layers.{match[1]}.{module}"
    return None


def _recipe(training: dict[str, Any]) -> dict[str, Any]:
    return {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": training}


def _matcher(pattern: str, config: str) -> dict[str, Any]:
    return {"config": config, "type": "glob", "pattern": pattern, "enabled": True}


def _check(entry: PlanEntry) -> None:
    """One linear is either BF16 or NVFP4 on both sides, and quantized inputs need a backward of one kind."""
    if not entry.quantized:
        return
    if entry.weight not in WEIGHTS or entry.input not in INPUTS:
        raise UserError(
            f"{entry.rule}: format '{entry.format}' has weight {entry.weight} and input {entry.input}, but Transformer "
            f"Engine's NVFP4 recipe has {' or '.join(WEIGHTS)} with {' or '.join(INPUTS)}; change precision.backend"
        )
    if "nvfp4" in (entry.dgrad, entry.wgrad):
        raise UserError(
            f"{entry.rule}: format '{entry.format}' has gradients in nvfp4, which backend te does not quantize as the "
            "plan says; use bf16 or dequantized, or another precision.backend"
        )
