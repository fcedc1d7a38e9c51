"""What computes a GEMM or a quantizer. Layers and samplers know a plan and a Backend, nothing else."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from minite.formats.qtensor import QTensor

Operand = Tensor | QTensor  # a plain tensor is a BF16 (or FP32) operand


class Fused(Protocol):
    """Stretches of a layer in fewer kernels. Each gives the bits that ``layers.ops`` and the backend give step by step.

    Forward only, and for bfloat16; None means "not these operands": the caller goes step by step.
    """

    def swiglu(self, gate_up_R2I: Tensor) -> Tensor | None: ...  # [R, I]; as ops.swiglu

    def combine(self, y_RH: Tensor, prob_R: Tensor, token_R: Tensor, num_tokens: int) -> Tensor | None: ...

    # [T, H]; as ops.moe_combine, where every token has equally many rows

    def experts(
        self,
        x_TH: Tensor,
        prob_Tk: Tensor,
        expert_Tk: Tensor,
        num_experts: int,
        gate_up: object,
        down: object,
        inputs: tuple[str, str],
    ) -> Tensor | None: ...  # [T, H]; permute, gate_up, SwiGLU, down, combine. inputs: the operands of both GEMMs


class Backend(Protocol):
    """One way to compute. D_MN = A_MK @ B_NK.T; accumulation is FP32, or FP64 with ``strict``.

    ``prepare`` turns a weight into whatever the backend's GEMM reads fastest (for an emulation: codes x block scales,
    exact in BF16). It is called once per weight version; the result is opaque to callers and valid only for the
    backend that made it. ``decode`` says that most GEMMs will have few rows, so that the bytes of the weight are what
    they cost. The numbers are the same.
    """

    name: str
    kind: str  # "reference" | "emulated" | "native": printed wherever the backend is printed
    strict: bool
    fused: Fused | None  # None: layers go step by step

    def unsupported_reason(self, op: str, weight: str, input: str) -> str | None: ...  # None = supported

    def quantize(
        self, x_MK: Tensor, how: str, *, amax: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Operand: ...  # how: a name of config.operands; "bf16" returns x itself

    def prepare(self, w: Operand, *, decode: bool = False) -> object: ...

    def gemm(self, a_MK: Operand, b_NK: object, out_dtype: torch.dtype) -> Tensor: ...

    def grouped_gemm(self, a_RK: Operand, b_ENK: object, rows_E: Tensor, out_dtype: torch.dtype) -> Tensor: ...

    def grouped_wgrad(self, dy_RN: Tensor, x_RK: Tensor, rows_E: Tensor, dtype: torch.dtype) -> Tensor: ...

    # [E, N, K] = dy_e.T @ x_e; zeros for an expert without rows
