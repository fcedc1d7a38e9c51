"""The formulas of quant_matmul written out in float64, and the bound of one rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.formats import block_scaled, quantize_operand


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def dequantized(x: Tensor, how: str, dtype: torch.dtype = torch.float64) -> Tensor:
    """Values of an operand; in float64 without any rounding but that of amax / 2688."""
    operand = quantize_operand(x.detach(), how)
    if isinstance(operand, Tensor):
        return operand.to(dtype)
    if dtype != torch.float64:
        return operand.dequantize(dtype)
    values = block_scaled(operand, dtype)
    if operand.amax is None:
        return values
    return values * (operand.amax.double() / 2688).reshape(*operand.amax.shape, *[1] * (x.ndim - operand.amax.ndim))


def forward_and_gradients(x: Tensor, w: Tensor, dy: Tensor, spec) -> tuple[tuple[Tensor, float], ...]:
    """(value, magnitude) of y, dx and dw of one dense linear; magnitude = largest sum of absolute products."""
    x_grad = x if spec.wgrad == "bf16" else dequantized(x, spec.input, x.dtype)
    w_grad = w if spec.dgrad == "bf16" else dequantized(w, spec.weight, w.dtype)
    pairs = (
        (dequantized(x, spec.input), dequantized(w, spec.weight).T),
        (dy.double(), w_grad.detach().double()),
        (dy.double().T, x_grad.detach().double()),
    )
    return tuple((a @ b, float((a.abs() @ b.abs()).max()) if a.numel() and b.numel() else 0.0) for a, b in pairs)


def assert_rounded_once(actual: Tensor, exact: tuple[Tensor, float], contraction: int, strict: bool) -> None:
    """Half a unit in the last place of the storage dtype, plus what summing in FP32 (FP64) can add.

    Sum of K products: at most K * eps of the work dtype times the sum of magnitudes. The outer scales add four
    roundings of the work dtype.
    """
    value, magnitude = exact
    work_eps = torch.finfo(torch.float64 if strict else torch.float32).eps
    bound = (torch.finfo(actual.dtype).eps / 2 + 4 * work_eps) * value.abs() + contraction * work_eps * magnitude
    error = (actual.double() - value).abs()
    assert actual.shape == value.shape
    assert (error <= bound).all(), f"error {error.max():.3e}, allowed there {bound.flatten()[error.argmax()]:.3e}"
