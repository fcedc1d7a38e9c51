"""Number formats: how a tensor becomes codes and scales, and back. Pure torch; the numeric contract of the project."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor

from minite.config.operands import OPERANDS
from minite.formats.errors import FormatError, NonFiniteError
from minite.formats.qtensor import QTensor

__all__ = ["FormatError", "NonFiniteError", "QTensor", "block_scaled", "operand_amax", "quantize_operand"]


def quantize_operand(
    x: Tensor,
    how: str,
    *,
    amax: Tensor | None = None,
    generator: torch.Generator | None = None,
    name: str = "tensor",
) -> Tensor | QTensor:
    """x [.., rows, K] as the operand ``how`` (a name of config.operands); "bf16" returns x itself.

    amax: the outer amax to use instead of the one of x (fusion group, TP shard); float32, shaped as operand_amax.
    """
    module = _module(how)
    return x if module is None else module.quantize_operand(x, how, amax=amax, generator=generator, name=name)


def operand_amax(x: Tensor, how: str) -> Tensor | None:
    """The amax that decides the outer scale of x as operand ``how``; None if the format has no outer scale.

    float32 [] (tensor), [E] (weights [E, N, K]) or [.., rows] (row-scaled).
    """
    module = _module(how)
    return None if module is None else module.operand_amax(x, how)


def block_scaled(q: QTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """codes x block scales [*shape] of any format, without the outer scale; exact in bfloat16, float32, float64."""
    out: Tensor = import_module(f"minite.formats.{q.format}").block_scaled(q, dtype)
    return out


def _module(how: str) -> ModuleType | None:
    operand = OPERANDS.get(how)
    if operand is None:
        raise FormatError(f"operand {how!r} is unknown; expected one of {', '.join(OPERANDS)}")
    return None if operand.module is None else import_module(operand.module)
