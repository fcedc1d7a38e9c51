"""Row-wise functions of a transformer block. Each upcasts, computes, and rounds its result once to the storage dtype.

``strict`` means FP64 instead of FP32 work. Rounded to BF16 or FP32, FP64 results do not depend on the order in which
a kernel sums: that is what makes a token's value independent of the tokens computed beside it. (Torch casts FP64 to
BF16 through FP32; beside a tie that is one unit off the nearest, the same way on every side.)
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from minite.backends.base import Fused
from minite.backends.rowwise import matmul_no_few_rows
from minite.formats.rounding import round_once


def work_dtype(strict: bool) -> torch.dtype:
    """The dtype that sums and transcendental functions are computed in: float64 in strict mode, else float32."""
    return torch.float64 if strict else torch.float32


class _RoundOutput(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = x.dtype
        return round_once(x, dtype) if x.dtype == torch.float64 else x.to(dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0].to(ctx.dtype), None


def round_output(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An accumulated GEMM output in ``dtype``, rounded as a backend rounds its own: once. The gradient passes through.

    For sums that a backend cannot finish, such as those over tensor-parallel ranks: a plain cast there would part a
    learner from a sampler that runs the same GEMM on one rank.
    """
    rounded: Tensor = _RoundOutput.apply(x, dtype)
    return rounded


class _FusedRmsNorm(torch.autograd.Function):
    """The backend's kernel forward; backward the derivative in FP32, of the stored operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w_K: Tensor, eps: float, fused: Fused) -> Tensor:
        ctx.save_for_backward(x, w_K)
        ctx.eps = eps
        out = fused.rms_norm(x, w_K, eps)
        return rms_norm(x, w_K, eps, strict=False) if out is None else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        with torch.enable_grad():
            leaves = [t.detach().requires_grad_() for t in ctx.saved_tensors]
            out = rms_norm(*leaves, ctx.eps, strict=False)
            return *torch.autograd.grad(out, leaves, grads[0]), None, None


def rms_norm(x: Tensor, w_K: Tensor, eps: float, strict: bool, fused: Fused | None = None) -> Tensor:
    """w * x / sqrt(mean(x^2) + eps) over the last axis. x [..., K] -> same shape and dtype, rounded once.

    Hugging Face's Qwen3 rounds x / rms to the storage dtype before it multiplies by w; here there is one rounding.
    ``fused``: the backend's kernel, which sums the squares exactly; not for strict.
    """
    if fused is not None:
        out: Tensor = _FusedRmsNorm.apply(x, w_K, eps, fused)
        return out
    work = work_dtype(strict)
    return F.rms_norm(x.to(work), (x.shape[-1],), w_K.to(work), eps).to(x.dtype)


def rope_cos_sin(positions_T: Tensor, head_dim: int, theta: float) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position * theta^(-2i / head_dim), i < head_dim / 2. -> two float32 [T, head_dim / 2].

    Angles are computed in float64 and the tables rounded once, so they hold the same bits for a position wherever
    in a batch it stands, at any context length. (RoFormer, arXiv 2104.09864, eq. 15.)
    """
    half = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions_T.device)
    angle = positions_T.to(torch.float64)[:, None] * theta ** (-half / head_dim)
    return angle.cos().float(), angle.sin().float()


def apply_rope(x_THD: Tensor, cos: Tensor, sin: Tensor, strict: bool) -> Tensor:
    """Rotates channel i with channel i + D/2 (Hugging Face's layout of Qwen3). x [T, H, D] -> same shape and dtype."""
    work = work_dtype(strict)
    first, second = x_THD.to(work).chunk(2, dim=-1)
    cos, sin = cos.to(work)[:, None, :], sin.to(work)[:, None, :]
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_THD.dtype)


class _FusedSwiglu(torch.autograd.Function):
    """The backend's kernel forward; backward the derivative in FP32, of the stored operands."""

    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, fused: Fused) -> Tensor:
        ctx.save_for_backward(gate_up)
        out = fused.swiglu(gate_up)
        return swiglu(gate_up, strict=False) if out is None else out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (gate_up,) = ctx.saved_tensors
        with torch.enable_grad():
            leaf = gate_up.detach().requires_grad_()
            (grad,) = torch.autograd.grad(swiglu(leaf, strict=False), leaf, grads[0])
        return grad, None


def swiglu(gate_up: Tensor, strict: bool, fused: Fused | None = None) -> Tensor:
    """silu(gate) * up, where gate is the first half of the last axis. [..., 2I] -> [..., I], rounded once.

    ``fused``: the backend's, which is one kernel with the same bits; not for strict.
    """
    if fused is not None:
        out: Tensor = _FusedSwiglu.apply(gate_up, fused)
        return out
    gate, up = gate_up.to(work_dtype(strict)).chunk(2, dim=-1)
    return (F.silu(gate) * up).to(gate_up.dtype)


class _FusedWideLinear(torch.autograd.Function):
    """The backend's kernel forward. Backward in BF16 products, which need no FP32 copy of the weight.

    The FP32 gradient is the sum of two BF16 numbers up to 2^-16 of it, and so its products are.
    """

    @staticmethod
    def forward(ctx: Any, x_MK: Tensor, w_NK: Tensor, fused: Fused) -> Tensor:
        out_MN = fused.wide_linear(x_MK, w_NK)
        ctx.save_for_backward(x_MK, w_NK)
        return wide_linear(x_MK, w_NK, strict=False) if out_MN is None else out_MN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_MK, w_NK = ctx.saved_tensors
        high_MN = grads[0].to(x_MK.dtype)
        low_MN = (grads[0] - high_MN.float()).to(x_MK.dtype)

        def product(transposed: bool, other: Tensor) -> Tensor:
            parts = (d.t() if transposed else d for d in (high_MN, low_MN))
            high, low = (torch.mm(d, other, out_dtype=torch.float32) for d in parts)
            return (high + low).to(other.dtype)

        needs_x, needs_w, _ = ctx.needs_input_grad
        return product(False, w_NK) if needs_x else None, product(True, x_MK) if needs_w else None, None


def wide_linear(x_MK: Tensor, w_NK: Tensor, strict: bool, fused: Fused | None = None) -> Tensor:
    """x @ w.T, operands as they are, the result NOT rounded: float32 [M, N], float64 in strict mode.

    For the router and the LM head, whose outputs decide ranks and log-probs. A plan whose ``lm_head_dtype`` is bf16
    rounds the result afterwards. ``fused``: the backend's kernel for BF16 operands; not for strict.
    """
    if fused is not None and x_MK.dtype == w_NK.dtype == torch.bfloat16:
        out: Tensor = _FusedWideLinear.apply(x_MK, w_NK, fused)
        return out
    x_MK, w_NK = (t.to(work_dtype(strict)) for t in (x_MK, w_NK))
    return matmul_no_few_rows(x_MK, w_NK) if x_MK.device.type == "cpu" else x_MK @ w_NK.T
