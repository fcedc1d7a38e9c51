"""What a conversion writes: the tensors that a sampler would be sent, under the names of the format asked for.

to      quantized linears of the plan                                   config.json
nvfp4   the plan's operand, in ModelOpt's layout (modelopt.py)           quant_method modelopt
fp8     fp8_128x128 as weight (E4M3), weight_scale_inv float32           quant_method fp8
bf16    the model's dtype                                                none
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from minite.config import PrecisionPlan
from minite.errors import UserError
from minite.sync import modelopt
from minite.sync.hashing import dtype_name
from minite.sync.names import AMAX, FP8, KV_SCALES, MODELOPT

TARGETS = ("nvfp4", "bf16", "fp8")
QUANT_CONFIG = "hf_quant_config.json"


def retarget(plan: PrecisionPlan, to: str) -> PrecisionPlan:
    """The plan with the weight operands that ``to`` writes. UserError when nothing is left to quantize."""
    if to == "nvfp4":
        return plan
    operand = {"bf16": "bf16", "fp8": "fp8_128x128"}[to]
    entries = tuple(e if e.weight == "bf16" else dataclasses.replace(e, weight=operand) for e in plan.entries)
    if to == "fp8" and all(e.weight == "bf16" for e in entries):
        raise UserError("this plan quantizes no weight, so there is nothing to write as FP8; use a w4a4 or w8a8 recipe")
    return dataclasses.replace(plan, entries=entries)


def to_disk(to: str, plan: PrecisionPlan, sent: Mapping[str, Tensor], inputs: Mapping[str, float]) -> dict[str, Tensor]:
    """Sent tensors (``export.pack``) -> tensors of the files. ``inputs``: input scales that are known, by module."""
    disk: dict[str, Tensor] = {}
    for name, tensor in sent.items():
        module, _, part = name.rpartition(".")
        if part == AMAX:
            disk[f"{module}.{MODELOPT.outer}"] = modelopt.outer_scale(tensor)
            disk[f"{module}.{MODELOPT.input}"] = _number(inputs.get(module, modelopt.INPUT_SCALE), tensor)
        elif to == "fp8" and part == "weight_scale":
            disk[f"{module}.{FP8.block}"] = tensor
        elif to == "fp8" and tensor.dtype == torch.uint8:
            disk[name] = tensor.view(torch.float8_e4m3fn)
        else:
            disk[name] = tensor
        kv = KV_SCALES.get(module.rpartition(".")[2])
        if to == "nvfp4" and plan.kv_cache == "fp8" and kv and part == "weight":
            disk[f"{module}.{kv}"] = _number(modelopt.KV_SCALE, tensor)
    return disk


def to_sent(to: str, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
    """A tensor of the files -> the sent one that it holds, under its name; None: it is not sent. Undoes ``to_disk``."""
    module, _, part = name.rpartition(".")
    if part in (MODELOPT.outer, MODELOPT.input, *KV_SCALES.values()):
        return None
    if to == "fp8" and part == FP8.block:
        return f"{module}.weight_scale", tensor
    return name, tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn and part == "weight" else tensor


def configs(
    to: str, plan: PrecisionPlan, hf_config: Mapping[str, Any], dtype: torch.dtype
) -> dict[str, dict[str, Any]]:
    """JSON files to write, by name; ``dtype``: of what is not quantized. UserError for a plan that the format cannot
    express."""
    plain = {key: value for key, value in hf_config.items() if key not in ("quantization_config", "compression_config")}
    plain |= {key: dtype_name(dtype) for key in ("torch_dtype", "dtype") if key in plain}  # the old key and the new one
    if to == "bf16":
        return {"config.json": plain}
    if to == "fp8":
        return {"config.json": {**plain, "quantization_config": modelopt.fp8_config(plan)}}
    quantization = modelopt.quantization_config(plan)
    return {
        "config.json": {**plain, "quantization_config": quantization},
        QUANT_CONFIG: modelopt.hf_quant_config(quantization),
    }


def _number(value: float, like: Tensor) -> Tensor:
    return torch.full((), value, dtype=torch.float32, device=like.device)
