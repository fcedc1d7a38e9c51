"""ModelOpt's NVFP4 layout, as far as it differs from what a sampler is sent (stored.py): outer scales and configs.

Per quantized linear X: ``X.weight`` uint8 [N, K/2], ``X.weight_scale`` float8_e4m3fn [N, K/16], ``X.weight_scale_2``
float32 [] = amax / 2688 of the fusion group, ``X.input_scale`` float32 []. With an FP8 KV cache also
``..k_proj.k_scale`` and ``..v_proj.v_scale`` float32 [].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minite.config import PrecisionPlan
from minite.errors import UserError
from minite.formats.nvfp4 import OUTER_MAX

INPUT_SCALE = 1.0  # no calibrated value: miniTE scales activations as it meets them, per token or per call
KV_SCALE = 1.0  # likewise; it is the rule of layers/kv.py, and what SGLang and vLLM assume where there is none


def outer_scale(amax: Tensor) -> Tensor:
    """ModelOpt's ``weight_scale_2``: amax / 2688 in float32, and 1 for a tensor of zeros, as SGLang expects."""
    return torch.where(amax == 0, torch.ones_like(amax), amax / torch.full_like(amax, OUTER_MAX))


def quantization_config(plan: PrecisionPlan) -> dict[str, Any]:
    """``quantization_config`` of config.json. UserError for a plan that ModelOpt's layout cannot express."""
    quantized = [e for e in plan if e.quantized]
    other = [e for e in quantized if not e.weight.startswith("nvfp4") or not e.input.startswith(("nvfp4", "bf16"))]
    if not quantized or other:
        what = f"{other[0].name} is {other[0].weight} x {other[0].input}" if other else "nothing is quantized"
        raise UserError(f"this plan has no ModelOpt NVFP4 layout: {what}; use a w4a4 or w4a16 recipe")
    inputs = {"bf16" if e.input == "bf16" else "nvfp4" for e in quantized}
    if len(inputs) > 1:
        raise UserError("this plan has no ModelOpt NVFP4 layout: some inputs are NVFP4 and some BF16; use one of them")
    fp4 = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {"weights": fp4, "targets": ["Linear"]}
    if inputs == {"nvfp4"}:
        group["input_activations"] = fp4
    result: dict[str, Any] = {
        "config_groups": {"group_0": group},
        "ignore": _ignored(plan),
        "quant_algo": "NVFP4" if inputs == {"nvfp4"} else "W4A16_NVFP4",
        "group_size": 16,
        "producer": {"name": "minite"},
        "quant_method": "modelopt",
    }
    if plan.kv_cache == "fp8":
        result["kv_cache_scheme"] = {"dynamic": False, "num_bits": 8, "type": "float"}
    return result


def _ignored(plan: PrecisionPlan) -> list[str]:
    """Modules that stay as they are. SGLang and vLLM ask for the modules they have built, so fused ones are named too:
    qkv_proj, gate_up_proj, and all experts of a layer as one."""
    plain = [e for e in plan if not e.quantized]
    names = dict.fromkeys(e.name for e in plain)
    names |= dict.fromkeys(e.group for e in plain if e.group is not None)  # members of a group are decided alike
    quantized = {_stack(e.name) for e in plan if e.quantized}
    names |= dict.fromkeys(stack for e in plain if (stack := _stack(e.name)) and stack not in quantized)
    return list(names)


def _stack(name: str) -> str:
    """model.layers.3.mlp.experts of one of its experts; empty for other modules."""
    head, found, _ = name.partition(".experts.")
    return f"{head}.experts" if found else ""


def hf_quant_config(quantization: Mapping[str, Any]) -> dict[str, Any]:
    """hf_quant_config.json: the same, as ModelOpt's own file says it."""
    return {
        "producer": quantization["producer"],
        "quantization": {
            "quant_algo": quantization["quant_algo"],
            "kv_cache_quant_algo": "FP8" if "kv_cache_scheme" in quantization else None,
            "group_size": 16,
            "exclude_modules": quantization["ignore"],
        },
    }


def fp8_config(plan: PrecisionPlan) -> dict[str, Any]:
    """``quantization_config`` of a block FP8 checkpoint (DeepSeek-V3's, which transformers and the engines read)."""
    return {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": [e.name for e in plan if e.weight == "bf16"],
    }
