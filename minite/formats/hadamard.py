"""The random Hadamard transform of 16 values, which spreads outliers over a block. Used on columnwise copies only.

TransformerEngine's definition (pytorch/custom_recipes/reference_nvfp4.py:335-341, hadamard_transform/*.cu): bfloat16
in and out, and for each 16 neighbouring values of the last dimension

    y_j = bf16( sum_i x_i * (SIGNS_i * H_ij / 4) )       H: Sylvester's matrix, H_ij = (-1)^popcount(i & j)

SIGNS is one fixed vector, the same for every tensor. The transform is orthogonal: applied to both operands of a GEMM
along its contraction it cancels, so nothing has to be undone.

Products are exact; the sum is float32 in the order i = 1, 0, 3, 2, .., 15, 14, that of the x86 BF16 dot product
(VDPBF16PS takes the upper of a pair first), which made the golden vectors. The order shows only where a partial sum
rounds or overflows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite.formats.errors import FormatError
from minite.formats.qtensor import in_blocks

SIZE = 16
SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def transform(x: Tensor, *, signs: bool = True) -> Tensor:
    """y [.., K] of bfloat16 x [.., K], K % 16 == 0; without ``signs`` the plain Hadamard matrix. Raises FormatError."""
    if x.dtype != torch.bfloat16 or not x.ndim or x.shape[-1] % SIZE:
        raise FormatError(f"hadamard: {x.dtype} {list(x.shape)}; expected bfloat16 [.., K % {SIZE} == 0]")
    matrix = _matrix(signs, x.device)
    blocks = in_blocks(x.detach().to(torch.float32), SIZE)
    y = torch.zeros_like(blocks)
    for i in range(SIZE):
        y.add_(blocks[..., i ^ 1, None] * matrix[i ^ 1])
    return y.flatten(-2).to(torch.bfloat16)


def _matrix(signs: bool, device: torch.device) -> Tensor:
    """[16, 16] float32, SIGNS_i * H_ij / 4."""
    rows = [[(SIGNS[i] if signs else 1) * (-1) ** (i & j).bit_count() / 4 for j in range(SIZE)] for i in range(SIZE)]
    return torch.tensor(rows, device=device)
