"""Matrix products of a CPU whose rows do not know of each other: float64 for strict mode, float32 for the others."""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


def matmul_no_few_rows(a_MK: Tensor, b_NK: Tensor) -> Tensor:
    """float32 [M, N] = a_MK @ b_NK.T on a CPU, where a decode step of few rows sums as a prefill of many does.

    MKL has other kernels for few rows, which add in another order: 1 to 3 with one thread, up to 7 with two (measured
    with torch 2.13 on one CPU with AVX2). Fewer than TILE_ROWS are therefore filled up with zeros. The library promises
    nothing of the kind: tests/backends/test_row_independence.py would show one that is otherwise. Differentiable.
    """
    m = a_MK.shape[0]
    if m >= TILE_ROWS:
        return a_MK @ b_NK.t()
    return (F.pad(a_MK, (0, 0, 0, TILE_ROWS - m)) @ b_NK.t())[:m]
