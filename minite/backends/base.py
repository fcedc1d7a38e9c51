"""What computes a GEMM or a quantizer. Layers and samplers know a plan and a Backend, nothing else."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from minite.formats.qtensor import QTensor

Operand = Tensor | QTensor  # a plain tensor is a BF16 (or FP32) operand


class Backend(Protocol):
    """One way to compute. D_MN = A_MK @ B_NK.T; accumulation is FP32, or FP64 with ``strict``.

    ``prepare`` turns a weight into whatever the backend's GEMM reads fastest (for an emulation: codes x block scales,
    exact in BF16). It is called once per weight version; the result is opaque to callers and valid only for the
    backend that made it.
    """

    name: str
    kind: str  # "reference" | "emulated" | "native": printed wherever the backend is printed
    strict: bool

    def unsupported_reason(self, op: str, weight: str, input: str) -> str | None: ...  # None = supported

    def quantize(
        self, x_MK: Tensor, how: str, *, amax: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Operand: ...  # how: a name of config.operands; "bf16" returns x itself

    def prepare(self, w: Operand) -> object: ...

    def gemm(self, a_MK: Operand, b_NK: object, out_dtype: torch.dtype) -> Tensor: ...

    def grouped_gemm(self, a_RK: Operand, b_ENK: object, rows_E: Tensor, out_dtype: torch.dtype) -> Tensor: ...
