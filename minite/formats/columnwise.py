"""Columnwise copies: a tensor quantized for a GEMM that contracts over its rows (wgrad: over tokens).

Blocks run along the contraction, so a columnwise copy is the transposed tensor quantized by rows, stored transposed:
codes [.., K, M/2], block scales [.., K, M/16]. With 16x16 blocks both copies hold the same values. With four over six
in 16x16 blocks that need not be so: the errors are summed in another order, and a near-tie may fall the other way.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from minite.formats import nvfp4
from minite.formats.errors import FormatError
from minite.formats.hadamard import transform
from minite.formats.qtensor import QTensor

HADAMARD = (None, "signs", "plain")


def quantize_columnwise(x: Tensor, *, hadamard: str | None = None, **options: Any) -> QTensor:
    """QTensor of shape [.., K, M] of x [.., M, K], M % 16 == 0. ``options`` are those of nvfp4.quantize.

    outer="row" then means a row of the copy: a column of x. hadamard: "signs" or "plain" (hadamard.py) transforms
    bfloat16 x along M first, and amax is measured, or has to be given, after that. Raises FormatError, NonFiniteError.
    """
    if hadamard not in HADAMARD:
        raise FormatError(f"quantize_columnwise: hadamard {hadamard!r}; expected None, 'signs' or 'plain'")
    x_KM = x.detach().transpose(-1, -2).contiguous()
    if hadamard is not None:
        x_KM = transform(x_KM, signs=hadamard == "signs")
    return nvfp4.quantize(x_KM, **options)
