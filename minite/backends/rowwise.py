"""A float64 matrix product whose rows do not know of each other: the ground of strict mode."""

from __future__ import annotations

import torch
from torch import Tensor

TILE_ROWS = 32  # below, libraries switch to other kernels; above, small decode batches pay for more padding


def matmul_rows(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """float64 [M, N] = a_MK @ b_NK.T (both float64), each row equal bit for bit alone or in any batch.

    A library picks kernel and summation order by the whole shape, M included (one row is even another routine). Here
    every call has the one shape (32, N, K), the last tile filled with zero rows, so M cannot choose anything. For
    NVFP4 operands with K <= 1024 the sum is moreover exact: products are multiples of 2^-20 below 2^23.
    """
    m, k = a_MK.shape
    b_KN = b_NK.t()
    out_MN = a_MK.new_empty(m, b_NK.shape[0])
    whole = m - m % TILE_ROWS
    for start in range(0, whole, TILE_ROWS):
        torch.mm(a_MK[start : start + TILE_ROWS], b_KN, out=out_MN[start : start + TILE_ROWS])
    if whole < m:
        last = a_MK.new_zeros(TILE_ROWS, k)
        last[: m - whole] = a_MK[whole:]
        out_MN[whole:] = torch.mm(last, b_KN)[: m - whole]
    return out_MN
