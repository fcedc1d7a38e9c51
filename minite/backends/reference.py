"""The reference backend: emulated GEMMs in plain torch, on a CPU or a GPU. Other backends are compared with it.

Operands are read as codes x block scales, which is exact in bfloat16 and wider, so that every product is exact too;
sums are float32 (float64 with strict). The outer scales come last, in the order of TransformerEngine's row-scaled GEMM
(pytorch/cpp_extensions/gemm.py:79-115 over a GEMM whose alpha holds the constants, recipe/nvfp4.cu:67-75):

    out = cast( (acc * alpha) * outer )
    alpha = fl(1 / 7225344) for two NVFP4 operands (7225344 = 2688^2), fl(1 / 2688) for one; 448 stands for 2688 in FP8
    outer = row_amax * weight_amax, multiplied first, for two; the one amax for one

FP8 with float32 scales per block is the exception: such a scale times a code is not exact in bfloat16, so those
operands are read in float32, where it is rounded once, on every device (float64 with strict, exact).

Each step is float32, or float64 with strict: there one rounding, to out_dtype, is left. The learner and the sampler
both come through here, so the order is the same on both sides by construction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from minite.backends.base import Operand
from minite.backends.rowwise import matmul_no_few_rows, matmul_rows
from minite.config.operands import OPERANDS
from minite.formats import FormatError, QTensor, block_scaled, quantize_operand
from minite.formats.rounding import round_once

_OPS = ("quantize", "gemm", "grouped_gemm")


@dataclass(frozen=True)
class Prepared:
    """An operand ready to multiply: values without the outer scale, and the amax that the outer scale comes from."""

    values: Tensor  # [rows, K] or [E, N, K], in the dtype that the product is computed from
    amax: Tensor | None  # [] | [rows] | [E]; None: nothing left to multiply
    outer_max: float = 1.0  # the outer scale is amax / outer_max


class ReferenceBackend:
    """See the module docstring. Implements backends.base.Backend."""

    name = "reference"
    kind = "reference"
    fused = None
    paths: tuple[str, ...] = ()

    def __init__(self, *, strict: bool) -> None:
        self.strict = strict

    @staticmethod
    def refused(device: str, strict: bool) -> str | None:
        """Why this backend cannot run there; None: it can."""
        return None

    def unsupported_reason(self, op: str, weight: str, input: str) -> str | None:
        """None for every pair of operand names in config.operands."""
        if op not in _OPS:
            return f"operation {op!r} is unknown; expected one of {', '.join(_OPS)}"
        unknown = [name for name in (weight, input) if name not in OPERANDS]
        return f"operand {unknown[0]!r} is unknown; expected one of {', '.join(OPERANDS)}" if unknown else None

    def quantize(
        self, x_MK: Tensor, how: str, *, amax: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Operand:
        """formats.quantize_operand: the definition that other backends have to equal byte for byte."""
        return quantize_operand(x_MK, how, amax=amax, generator=generator)

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        """Values [*shape] of a quantized tensor: QTensor.dequantize."""
        return q.dequantize(dtype)

    def quantize_input(self, x_MK: Tensor, how: str, *, amax: Tensor | None = None) -> Operand:
        """quantize: nothing is gained here by a form that only a GEMM could read."""
        return self.quantize(x_MK, how, amax=amax)

    def prepare(self, w: Operand, *, decode: bool = False) -> Prepared:
        """A weight [N, K] or [E, N, K] in the dtype of the product, to be kept as long as the weight lives."""
        if isinstance(w, QTensor) and w.outer == "row":
            raise FormatError("reference: a weight with one outer scale per row; expected one per tensor or expert")
        return self._read(w)

    def gemm(self, a_MK: Operand, b_NK: object, out_dtype: torch.dtype) -> Tensor:
        """[M, N] = a_MK @ b_NK.T in out_dtype (bfloat16, float32; strict also float64). b_NK comes from prepare."""
        assert isinstance(b_NK, Prepared)
        a = self._read(a_MK)
        acc_MN = self._product(a.values, b_NK.values)
        return self._finish(acc_MN, a, b_NK, out_dtype)

    def gemm_of_parts(self, a_MK: Operand, b_NK: object, out_dtype: torch.dtype, partial: Any) -> Tensor:
        """As gemm, of a rank that holds a part of K: its rows [m, N] of the total. See layers.matmul.PartialSums."""
        assert isinstance(b_NK, Prepared) and self.strict
        a = self._read(a_MK)
        acc_mN = partial.reduce(self._product(a.values, b_NK.values))
        by_row = a.amax is not None and a.amax.ndim == 1
        a = replace(a, amax=partial.own_rows(a.amax) if by_row and a.amax is not None else a.amax)
        return self._finish(acc_mN, a, b_NK, out_dtype)

    def grouped_gemm(self, a_RK: Operand, b_ENK: object, rows_E: Tensor, out_dtype: torch.dtype) -> Tensor:
        """[R, N]: rows of a_RK, sorted by expert, each times its expert's weight. rows_E: integers that sum to R."""
        assert isinstance(b_ENK, Prepared)
        a = self._read(a_RK)
        sizes = rows_E.tolist()
        if sum(sizes) != a.values.shape[0] or len(sizes) != b_ENK.values.shape[0]:
            got = f"{len(sizes)} experts with {sum(sizes)} rows"
            want = f"{b_ENK.values.shape[0]} experts with {a.values.shape[0]} rows"
            raise FormatError(f"reference.grouped_gemm: rows_E says {got}; expected {want}")
        starts = [sum(sizes[:e]) for e in range(len(sizes))]
        parts = [
            self._product(a.values[start : start + size], weight_NK)
            for start, size, weight_NK in zip(starts, sizes, b_ENK.values, strict=True)
            if size
        ]
        n = b_ENK.values.shape[1]
        acc_RN = torch.cat(parts) if parts else a.values.new_zeros(0, n, dtype=self._sum_dtype)
        b = b_ENK
        if b.amax is not None and b.amax.ndim == 1:
            b = replace(b, amax=b.amax.repeat_interleave(rows_E.to(b.amax.device)))
        return self._finish(acc_RN, a, b, out_dtype)

    @property
    def _sum_dtype(self) -> torch.dtype:
        return torch.float64 if self.strict else torch.float32

    def grouped_wgrad(self, dy_RN: Tensor, x_RK: Tensor, rows_E: Tensor, dtype: torch.dtype) -> Tensor:
        """[E, N, K] = dy_e.T @ x_e by expert; zeros for one without rows: its optimizer state advances too."""
        dw_ENK = x_RK.new_zeros(len(rows_E), dy_RN.shape[1], x_RK.shape[1], dtype=dtype)
        sizes = rows_E.tolist()
        for e, (dy_rN, x_rK) in enumerate(zip(dy_RN.split(sizes), x_RK.split(sizes), strict=True)):
            if len(dy_rN):
                dw_ENK[e] = self.gemm(dy_rN.T, self.prepare(x_rK.T), dtype)
        return dw_ENK

    def grouped_wgrad_of_codes(self, dy_NR: QTensor, x_KR: QTensor, columns_E: Tensor, dtype: torch.dtype) -> Tensor:
        """[E, N, K] by expert, of columnwise codes: the columns of an expert in one times those in the other."""
        a, b = self._read(dy_NR), self.prepare(x_KR)
        dw_ENK = a.values.new_zeros(len(columns_E), a.values.shape[0], b.values.shape[0], dtype=dtype)
        first = 0
        for e, columns in enumerate(columns_E.tolist()):
            part = slice(first, first := first + columns)
            if columns:
                dw_ENK[e] = self._finish(self._product(a.values[:, part], b.values[:, part]), a, b, dtype)
        return dw_ENK

    def _read(self, x: Operand | Prepared) -> Prepared:
        if isinstance(x, Prepared):
            return x
        if self.strict:
            dtype = torch.float64
        elif x.device.type == "cpu":
            dtype = torch.float32  # most CPUs multiply float32 far faster than bfloat16; the products are exact anyway
        else:
            dtype = torch.bfloat16
        if isinstance(x, QTensor):
            if x.block_scale is not None and x.block_scale.dtype == torch.float32:
                dtype = torch.promote_types(dtype, torch.float32)
            return Prepared(self._block_scaled(x, dtype), x.amax, 1.0 if x.amax is None else x.outer_max)
        return Prepared(x.to(torch.promote_types(dtype, x.dtype)), None)

    def _block_scaled(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        return block_scaled(q, dtype)

    def _product(self, a_MK: Tensor, b_NK: Tensor) -> Tensor:
        """a_MK @ b_NK.T, summed and returned in _sum_dtype."""
        if self.strict:
            return matmul_rows(a_MK, b_NK)
        if a_MK.dtype == b_NK.dtype == torch.bfloat16:
            return torch.mm(a_MK, b_NK.t(), out_dtype=torch.float32)
        if a_MK.device.type == "cpu":
            return matmul_no_few_rows(a_MK.to(torch.float32), b_NK.to(torch.float32))
        return torch.mm(a_MK.to(torch.float32), b_NK.to(torch.float32).t())

    def _finish(self, acc: Tensor, a: Prepared, b: Prepared, out_dtype: torch.dtype) -> Tensor:
        """Outer scales and the cast, in place on acc [rows, N]; amaxes are [] or [rows]."""
        amaxes = [side.amax.to(acc.dtype) for side in (a, b) if side.amax is not None]
        if amaxes:
            outer = amaxes[0] * amaxes[1] if len(amaxes) == 2 else amaxes[0]
            acc = acc.mul_(1 / (a.outer_max * b.outer_max)).mul_(outer.unsqueeze(-1))
        if self.strict:
            return round_once(acc, out_dtype)
        if out_dtype == torch.float64:
            raise FormatError("reference: out_dtype float64 of a float32 sum; use strict, or ask for float32")
        return acc.to(out_dtype)
