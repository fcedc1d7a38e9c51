"""Shapes and inputs that several test folders share. Every input is made from a fixed seed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

DEVICES = ("cpu", pytest.param("cuda", marks=pytest.mark.gpu))

# (M, N, K): one row, an odd row count, tile borders of the strict product (32), K at its smallest and past 1024
GEMM_SHAPES_MNK = ((1, 16, 32), (3, 17, 64), (32, 48, 96), (65, 33, 512), (4, 8, 2048))


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed)).to(dtype)


def exact_norm(x: Tensor, weight_K: Tensor, eps: float) -> Tensor:
    """BF16 RMS norm of BF16 [.., K] on a CPU as fused kernels promise it: exact squares, float32 steps, one rounding.

    The root is taken in float64 and rounded: torch's float32 root is one unit off for a fifth of all numbers on some
    CPUs, a GPU's is not.
    """
    mean = x.double().square().sum(-1, keepdim=True).float() / x.shape[-1]
    return (x.float() * (1 / (mean + eps).double().sqrt().float()) * weight_K.float()).bfloat16()


def outlier_channels(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """A few columns a hundred times larger, as activations have them."""
    x = torch.randn(m, k, generator=seeded(1))
    x[:, ::13] *= 100
    return x.to(dtype)


def wide_rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Row magnitudes from 2^-40 to 2^40 (float16: 2^-14 to 2^14), so that tensor-wide block scales underflow."""
    spread = 14 if dtype == torch.float16 else 40
    exponent = torch.linspace(-spread, spread, m).round()
    return (torch.randn(m, k, generator=seeded(2)).clamp(-1.9, 1.9) * torch.exp2(exponent)[:, None]).to(dtype)


def wide_blocks(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Every element with an exponent of its own: blocks mix codes 0 to 7, scales reach E4M3 subnormals and 0."""
    exponent = torch.randint(-14, 14, (m, k), generator=seeded(3)).float()
    return (torch.randn(m, k, generator=seeded(4)).clamp(-1.9, 1.9) * torch.exp2(exponent)).to(dtype)


def subnormals(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """The dtype's own subnormals, both signs, with zeros of both signs between them: 2688 / amax overflows."""
    smallest = torch.finfo(dtype).smallest_normal / 8
    x = torch.randint(-7, 8, (m, k), generator=seeded(5)).to(torch.float64) * smallest
    x[:, ::5] = -0.0
    return x.to(dtype)


def huge(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """Up to the largest finite value of the dtype."""
    x = torch.rand(m, k, generator=seeded(6), dtype=torch.float64) * 2 - 1
    x[0, 0] = 1
    return (x * torch.finfo(dtype).max).to(dtype)


def zeros_of_both_signs(m: int, k: int, dtype: torch.dtype) -> Tensor:
    x = torch.zeros(m, k, dtype=dtype)
    x[:, 1::2] = -0.0
    return x


def some_zero_blocks(m: int, k: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(m, k, generator=seeded(7))
    x[:, : k // 2] = 0
    x[::2, : k // 4] = -0.0
    return x.to(dtype)


def code_ties(m: int, k: int, dtype: torch.dtype) -> Tensor:
    """With amax 6 every block scale is 448 / 448 of the outer one, and these values sit on E2M1 ties or beside them."""
    base = torch.tensor([6, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5])
    x = base.repeat(m, k // 8)
    nudge = torch.randint(-1, 2, (m, k), generator=seeded(8))
    nudge[:, ::8] = 0
    sign = 1 - 2 * torch.randint(0, 2, (m, k), generator=seeded(9))
    return (sign * x * (1 + nudge * torch.finfo(dtype).eps)).to(dtype)


EDGE_INPUTS: dict[str, Callable[[int, int, torch.dtype], Tensor]] = {
    f.__name__: f
    for f in (
        outlier_channels,
        wide_rows,
        wide_blocks,
        subnormals,
        huge,
        zeros_of_both_signs,
        some_zero_blocks,
        code_ties,
    )
}
