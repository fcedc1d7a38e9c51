"""Backends that note what passes through them, call by call: to compare two engines layer by layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minite.backends.base import Backend, Fused, Operand
from minite.formats.qtensor import QTensor

Call = dict[str, Any]  # how: str, x: Tensor, and for a quantized result its parts: codes, block_scale, amax


class Recording:
    """A backend that notes every quantizer call and leaves the rest to ``inner``. Calls made in CUDA graphs pass by."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.fused: Fused | None = None  # step by step, so that every quantizer call passes here
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def quantize(self, x_MK: Tensor, how: str, **arguments: Any) -> Operand:
        out = self.inner.quantize(x_MK, how, **arguments)
        parts = {name: part.cpu() for name, part in out.tensors().items()} if isinstance(out, QTensor) else {}
        self.calls.append({"how": how, "x": x_MK.cpu(), **parts})
        return out

    def quantize_input(self, x_MK: Tensor, how: str, **arguments: Any) -> Operand:
        """As codes, which any GEMM of the backend takes as well."""
        return self.quantize(x_MK, how, **arguments)

    def save(self, path: str | Path) -> None:
        torch.save(self.calls, path)


@dataclass(frozen=True)
class GemmCall:
    """One GEMM: both operands as they were before and after quantization, and the result."""

    op: str  # "gemm" | "grouped_gemm"
    x: Tensor  # [M, K] before quantization
    how: str  # operand name of the input
    a: Operand
    weight: Operand  # [N, K] or [E, N, K]
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


@dataclass(frozen=True)
class _Prepared:
    """A weight as the inner backend reads it, and as it was stored."""

    weight: Operand
    inner: object


class RecordingGemms(Recording):
    """A backend that hands every forward GEMM to ``note``. Weights must be prepared by this object."""

    def __init__(self, inner: Backend, note: Note) -> None:
        super().__init__(inner)
        self._note = note
        self._input: tuple[Tensor, str, Operand] | None = None

    def quantize(self, x_MK: Tensor, how: str, **arguments: Any) -> Operand:
        return self.inner.quantize(x_MK, how, **arguments)

    def quantize_input(self, x_MK: Tensor, how: str, **arguments: Any) -> Operand:
        out = self.inner.quantize(x_MK, how, **arguments)
        self._input = x_MK, how, out
        return out

    def prepare(self, w: Operand, *, decode: bool = False) -> object:
        return _Prepared(w, self.inner.prepare(w, decode=decode))

    def gemm(self, a_MK: Operand, b_NK: object, out_dtype: torch.dtype) -> Tensor:
        assert isinstance(b_NK, _Prepared)
        out = self.inner.gemm(a_MK, b_NK.inner, out_dtype)
        return self._noted("gemm", a_MK, b_NK.weight, out)

    def grouped_gemm(self, a_RK: Operand, b_ENK: object, rows_E: Tensor, out_dtype: torch.dtype) -> Tensor:
        assert isinstance(b_ENK, _Prepared)
        out = self.inner.grouped_gemm(a_RK, b_ENK.inner, rows_E, out_dtype)
        return self._noted("grouped_gemm", a_RK, b_ENK.weight, out)

    def _noted(self, op: str, a: Operand, weight: Operand, out: Tensor) -> Tensor:
        if self._input is None or self._input[2] is not a:
            raise RuntimeError(f"{op}: its input did not come from this backend's quantize_input")
        x, how, _ = self._input
        self._note(GemmCall(op, x, how, a, weight, out))
        return out
