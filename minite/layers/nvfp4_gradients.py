"""The choice ``nvfp4`` for dgrad and wgrad: products of two NVFP4 operands, each quantized along what is summed over.

dgrad      dx = Q(dy) @ Q(W)       blocks along N: dy by rows, W columnwise (formats/columnwise.py)
wgrad      dw = Q(H dy).T @ Q(H x)  blocks along tokens, both columnwise after the random Hadamard transform H, which
                                    cancels in the product

dy is rounded stochastically, as a gradient's small values must survive on average; W and x to nearest. One outer scale
per row of the result on the side of dy, one per matrix (per expert for W) on the other. Seeds come from torch's CPU
generator, which a checkpoint holds. Tokens are padded with zeros, so that no block holds two experts.

A dy with NaN or Inf has no codes: the result is NaN then, all of it, as a product with it would be. Raising would stop
one rank in the middle of a backward pass that the others wait in; the optimizer sees NaN on all and skips the step.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minite.backends.base import Backend
from minite.formats import NonFiniteError, QTensor, nvfp4
from minite.formats.columnwise import quantize_columnwise

PADDED = 64  # tokens of an expert are a multiple of: a whole tile of block scales along the sum


def dgrad(dy_MN: Tensor, w_NK: Tensor, backend: Backend, dtype: torch.dtype, name: str) -> Tensor:
    """[M, K] in ``dtype`` of dy [M, N] and w [N, K], N % 16 == 0. Raises FormatError that names the module."""
    codes_KN = quantize_columnwise(w_NK, name=f"weight of {name}")
    dy = _stochastic(dy_MN)
    if dy is None:
        return _nan(dy_MN, dtype, len(dy_MN), w_NK.shape[1])
    return backend.gemm(dy, backend.prepare(codes_KN), dtype)


def grouped_dgrad(
    dy_RN: Tensor, w_ENK: Tensor, rows_E: Tensor, backend: Backend, dtype: torch.dtype, name: str
) -> Tensor:
    """The same by expert: [R, K] of rows sorted by expert."""
    codes_EKN = quantize_columnwise(w_ENK, outer="expert", name=f"weight of {name}")
    dy = _stochastic(dy_RN)
    if dy is None:
        return _nan(dy_RN, dtype, len(dy_RN), w_ENK.shape[2])
    return backend.grouped_gemm(dy, backend.prepare(codes_EKN), rows_E, dtype)


def wgrad(dy_MN: Tensor, x_MK: Tensor, backend: Backend, dtype: torch.dtype, name: str) -> Tensor:
    """[N, K] in ``dtype`` of dy [M, N] and x [M, K]. float32 operands are rounded to bfloat16 for the transform."""
    dy_NM, x_KM = _transformed(*(_padded(t) for t in (dy_MN, x_MK)), name)
    if dy_NM is None:
        return _nan(dy_MN, dtype, dy_MN.shape[1], x_MK.shape[1])
    return backend.gemm(dy_NM, backend.prepare(x_KM), dtype)


def grouped_wgrad(
    dy_RN: Tensor, x_RK: Tensor, rows_E: Tensor, backend: Backend, dtype: torch.dtype, name: str
) -> Tensor:
    """[E, N, K] by expert, zeros for one without rows; the host does not read rows_E here."""
    padded_E = ((rows_E + (PADDED - 1)) // PADDED).clamp(min=1) * PADDED  # CUTLASS takes no empty sum
    shift_E = (padded_E - rows_E).cumsum(0) - (padded_E - rows_E)
    position_R = torch.arange(len(x_RK), device=x_RK.device)
    position_R += shift_E.repeat_interleave(rows_E, output_size=len(x_RK))
    most = len(x_RK) + PADDED * len(rows_E)  # of any split of the rows

    def spread(t: Tensor) -> Tensor:
        return t.new_zeros(_whole(most), t.shape[1]).index_copy_(0, position_R, t.detach())

    dy_NR, x_KR = _transformed(spread(dy_RN), spread(x_RK), name)
    if dy_NR is None:
        return _nan(dy_RN, dtype, len(rows_E), dy_RN.shape[1], x_RK.shape[1])
    return backend.grouped_wgrad_of_codes(dy_NR, x_KR, padded_E, dtype)


def _stochastic(dy_MN: Tensor) -> QTensor | None:
    """None where dy is not finite."""
    try:
        return nvfp4.quantize(dy_MN, outer="row", **_rounding())
    except NonFiniteError:
        return None


def _rounding() -> dict[str, Any]:
    return {"rounding": "stochastic", "generator": torch.default_generator}


def _transformed(dy_MN: Tensor, x_MK: Tensor, name: str) -> tuple[QTensor | None, QTensor]:
    """Columnwise codes [N, M] and [K, M]; None where dy is not finite."""
    dy, x = dy_MN.to(torch.bfloat16), x_MK.to(torch.bfloat16)
    gradient: QTensor | None
    try:
        gradient = quantize_columnwise(dy, hadamard="signs", outer="row", **_rounding())
    except NonFiniteError:
        gradient = None
    return gradient, quantize_columnwise(x, hadamard="signs", name=f"input of {name}")


def _nan(dy: Tensor, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.full(shape, torch.nan, dtype=dtype, device=dy.device)


def _padded(t: Tensor) -> Tensor:
    return torch.nn.functional.pad(t.detach(), (0, 0, 0, _whole(len(t)) - len(t)))


def _whole(tokens: int) -> int:
    """The next multiple of PADDED, at least one."""
    return max(1, -(-tokens // PADDED)) * PADDED
