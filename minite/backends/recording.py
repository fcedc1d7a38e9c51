"""A backend that notes the GEMMs that pass through it: to compare two engines operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from minite.backends.base import Backend, Fused, Operand


@dataclass(frozen=True)
class GemmCall:
    """One GEMM: both operands as they were before and after quantization, and the result."""

    op: str  # "gemm" | "grouped_gemm"
    x: Tensor  # [M, K] before quantization
    how: str  # operand name of the input
    a: Operand
    weight: dict[str, Tensor]  # its ``parts``: ``row_hash`` of codes and block scales, outer scales as they are
    out: Tensor


@dataclass(frozen=True)
class OpCall:
    """One call of a shared operation (layers/recording.py notes them).

    Rows of inputs, internals and outputs are tokens, or (token, expert) pairs in the order of ``moe_permute``.
    """

    op: str  # the name in layers.ops; "attention" for a decode step too
    inputs: dict[str, Tensor]
    outputs: dict[str, Tensor]
    internals: dict[str, Tensor] = field(default_factory=dict)
    parameters: dict[str, Tensor | float | str] = field(default_factory=dict)


Note = Callable[[OpCall | GemmCall], None]


def parts(operand: Operand) -> dict[str, Tensor]:
    """Outer scale, block scales, codes: in the order in which one decides the next. A plain tensor is one part."""
    if isinstance(operand, Tensor):
        return {"": operand}
    named = (("outer scale", operand.amax), ("block scales", operand.block_scale), ("codes", operand.codes))
    return {name: part for name, part in named if part is not None}


def row_hash(x: Tensor) -> Tensor:
    """int64 [..., N] of [..., N, K], equal for rows of equal bits; a weight is large, and told in full by nobody.

    Floats count as FP32, which loses nothing of a weight, so that engines that hold it in two dtypes agree.
    """
    if x.ndim == 3:
        return torch.stack([row_hash(x_NK) for x_NK in x])
    x = x.detach()
    bits = x.float().contiguous().view(torch.int32) if x.is_floating_point() else x
    odd_K = torch.arange(x.shape[-1], device=x.device) * -7046029254386353131 | 1
    return torch.cat([((chunk.long() + 0x9E3779B9) * odd_K).sum(-1) for chunk in bits.split(1 << 14)])


@dataclass(frozen=True)
class Prepared:
    """A weight as the inner backend reads it, and as it was stored."""

    weight: Operand
    inner: object

    @cached_property
    def rows(self) -> dict[str, Tensor]:
        """Its parts as GemmCall tells them."""
        return {name: row_hash(part) if part.ndim > 1 else part for name, part in parts(self.weight).items()}


class RecordingGemms:
    """A backend that hands every forward GEMM to ``note``. Weights must be prepared by this object, or be Prepared.

    GEMMs in CUDA graphs pass by. It has no fused kernels: engines compute step by step, so that every GEMM passes here.
    """

    def __init__(self, inner: Backend, note: Note) -> None:
        self.inner = inner
        self.fused: Fused | None = None
        self._note = note
        self._input: tuple[Tensor, str, Operand] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def quantize_input(self, x_MK: Tensor, how: str, **arguments: Any) -> Operand:
        out = self.inner.quantize(x_MK, how, **arguments)
        self._input = x_MK, how, out
        return out

    def prepare(self, w: Operand, *, decode: bool = False) -> object:
        return Prepared(w, self.inner.prepare(w, decode=decode))

    def gemm(self, a_MK: Operand, b_NK: object, out_dtype: torch.dtype) -> Tensor:
        assert isinstance(b_NK, Prepared)
        out = self.inner.gemm(a_MK, b_NK.inner, out_dtype)
        return self._noted("gemm", a_MK, b_NK.rows, out)

    def grouped_gemm(self, a_RK: Operand, b_ENK: object, rows_E: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert isinstance(b_ENK, Prepared)
        out = self.inner.grouped_gemm(a_RK, b_ENK.inner, rows_E, out_dtype)
        return self._noted("grouped_gemm", a_RK, b_ENK.rows, out)

    def _noted(self, op: str, a: Operand, weight: dict[str, Tensor], out: Tensor) -> Tensor:
        if self._input is None or self._input[2] is not a:
            raise RuntimeError(f"{op}: its input did not come from this backend's quantize_input")
        x, how, _ = self._input
        self._note(GemmCall(op, x, how, a, weight, out))
        return out
