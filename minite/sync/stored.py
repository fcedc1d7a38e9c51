"""What the sampler is sent for one weight: names, shapes and dtypes by operand, and the way to a QTensor and back.

    bf16          X.weight [N, K] in the model's dtype
    nvfp4_1d/2d   X.weight uint8 [N, K/2], X.weight_scale float8_e4m3fn [N, K/16], X.weight_amax float32 []
    mxfp8         X.weight uint8 [N, K], X.weight_scale float8_e8m0fnu [N, K/32]
    fp8_tensor    X.weight uint8 [N, K], X.weight_amax float32 []
    fp8_128x128   X.weight uint8 [N, K], X.weight_scale float32 [N/128, K/128], rounded up

nvfp4_1d_4o6 is stored as nvfp4_1d is: its codes and scales differ, the way to read them does not.

``weight_amax`` is the outer amax of the fusion group as the learner used it. It is sent instead of amax / 2688, from
which it could not be recovered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minite.config.plan import PrecisionPlan
from minite.config.schema import ModelConfig
from minite.formats.qtensor import QTensor
from minite.models import get_model

MODEL_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # ModelConfig.dtype
_BLOCKS: dict[str, dict[str, tuple[int, int] | None]] = {  # format -> weight operand -> block; None: the whole matrix
    "nvfp4": {"nvfp4_1d": (1, 16), "nvfp4_1d_4o6": (1, 16), "nvfp4_2d": (16, 16)},
    "mxfp8": {"mxfp8": (1, 32)},
    "fp8": {"fp8_tensor": None, "fp8_128x128": (128, 128)},
}
_FIELDS = {"weight": "codes", "weight_scale": "block_scale", "weight_amax": "amax"}  # suffix -> field of QTensor


@dataclass(frozen=True)
class Stored:
    """Shape and dtype of one tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def stored_parts(operand: str, n: int, k: int, dtype: torch.dtype) -> dict[str, Stored]:
    """Suffix -> shape and dtype of an [N, K] weight held as ``operand``; ``dtype`` is the model's."""
    if operand == "bf16":
        return {"weight": Stored((n, k), dtype)}
    if operand in _BLOCKS["nvfp4"]:
        return {
            "weight": Stored((n, k // 2), torch.uint8),
            "weight_scale": Stored((n, k // 16), torch.float8_e4m3fn),
            "weight_amax": Stored((), torch.float32),
        }
    if operand == "mxfp8":
        return {
            "weight": Stored((n, k), torch.uint8),
            "weight_scale": Stored((n, k // 32), torch.float8_e8m0fnu),
        }
    if operand == "fp8_tensor":
        return {"weight": Stored((n, k), torch.uint8), "weight_amax": Stored((), torch.float32)}
    if operand == "fp8_128x128":
        return {
            "weight": Stored((n, k), torch.uint8),
            "weight_scale": Stored((-(-n // 128), -(-k // 128)), torch.float32),
        }
    raise NotImplementedError(f"no stored form of weight operand {operand!r}")


def stored_model(plan: PrecisionPlan, model: ModelConfig) -> dict[str, Stored]:
    """Every tensor that a sampler of this plan and model holds, by the name it is sent under."""
    dtype = MODEL_DTYPES[model.dtype]
    result: dict[str, Stored] = {}
    for name, shape in get_model(model.kind).hf_tensors(model).items():
        entry = plan.get(name.removesuffix(".weight"))
        if entry is None:
            result[name] = Stored(shape, dtype)
            continue
        for suffix, stored in stored_parts(entry.weight, entry.n, entry.k, dtype).items():
            result[f"{entry.name}.{suffix}"] = stored
    return result


def to_parts(q: QTensor) -> dict[str, Tensor]:
    """Suffix -> tensor, verbatim."""
    tensors = q.tensors()
    return {suffix: tensors[field] for suffix, field in _FIELDS.items() if field in tensors}


def from_parts(operand: str, parts: Mapping[str, Tensor]) -> QTensor:
    """The QTensor of stored parts, verbatim. A leading expert axis is allowed: codes [E, N, ..], amax [E]."""
    codes = parts["weight"]
    format, blocks = next((format, blocks) for format, blocks in _BLOCKS.items() if operand in blocks)
    shape = (*codes.shape[:-1], codes.shape[-1] * (2 if format == "nvfp4" else 1))
    return QTensor(
        format=format,
        codes=codes,
        block_scale=parts.get("weight_scale"),
        amax=parts.get("weight_amax"),
        shape=shape,
        block=blocks[operand] or (shape[-2], shape[-1]),
        outer_max=448.0 if format == "fp8" else 2688.0,
    )
