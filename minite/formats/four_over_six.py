"""Four over six: each NVFP4 block is encoded twice, its largest value as code value 6 or as 4, and the better one kept.

6 is followed by 4, so a value near 5/6 of the block's largest loses most; with the scale 1.5 times larger the largest
becomes 4 and its neighbours are denser. TransformerEngine's order (cast/nvfp4/quantize_4over6_nvfp4.cuh:126-355,541),
all float32, round to nearest, nothing fused. m is the bound, 448 or 256; with 256 every block has room for the 1.5:

    S_enc = min((6 * m) / amax, FLT_MAX)          1 where amax == 0 or S_enc == 0
    base  = (amax_b / 6) * S_enc                  a true division, unlike plain NVFP4
    s4    = e4m3(min(base * 1.5, 448));  s6 = e4m3(min(base, 448));  encode factors and codes as in nvfp4.py
    exact error of an element   d = (((code * s) * amax) / (6 * m)) - x
    fast error                  d = (code * s) - (x * S_enc)       the product is exact (the kernels use FP16 for it)
    err   = the 16 |d| (mae) or d * d (mse), added one after the other
    16x16 blocks: the 16 row errors are added as a tree, rows r and r + 8, then r + 4, r + 2, r + 1
    s4 is taken where err4 < err6; a tie takes s6

Reading back is nvfp4.dequantize, with fl(1 / (6 * m)).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minite.formats.e2m1 import code_values, pack
from minite.formats.errors import FormatError
from minite.formats.nvfp4_scales import encode_factor, outer_encode
from minite.formats.qtensor import in_blocks
from minite.formats.rounding import E2M1_MAX, e4m3

BLOCK = 16


@dataclass(frozen=True)
class FourOverSix:
    """How the two encodings are compared."""

    err: str = "mse"  # "mae" | "mse"
    bound: int = 448  # 448 | 256: the block scale that the outer amax maps to
    fast_error: bool = False  # compare in the scaled domain, without the outer scale

    def __post_init__(self) -> None:
        if self.err not in ("mae", "mse") or self.bound not in (448, 256):
            raise FormatError(f"four_over_six: {self}; expected err 'mae' or 'mse' and bound 448 or 256")

    @property
    def outer_max(self) -> float:
        return E2M1_MAX * self.bound


def encode(
    x: Tensor,
    block_amax: Tensor,
    amax: Tensor,
    block_rows: int,
    how: FourOverSix,
    to_codes: Callable[[Tensor], Tensor],
) -> tuple[Tensor, Tensor]:
    """Packed codes [rows, K/2] and E4M3 block scales [rows, K/16] of float32 x [rows, K].

    block_amax: [rows, K/16], equal over the 16 rows of a 16x16 block. amax: the outer one, [rows, 1] or [].
    block_rows: 1 or 16. to_codes: float32 -> E2M1 codes.
    """
    s_enc = outer_encode(amax, how.outer_max)
    base = block_amax / torch.full_like(block_amax, E2M1_MAX) * s_enc
    scales = e4m3(base * 1.5), e4m3(base)
    codes, errors = [], []
    for scale in scales:
        scaled = in_blocks(x, BLOCK) * encode_factor(scale, s_enc).unsqueeze(-1)
        codes.append(pack(to_codes(scaled).flatten(-2)))
        errors.append(_error(x, codes[-1], scale, s_enc, amax, how))
    if block_rows == BLOCK:
        errors = [_over_rows(error) for error in errors]
    four = errors[0] < errors[1]
    codes4, codes6 = (in_blocks(c, BLOCK // 2) for c in codes)
    scale4, scale6 = (scale.view(torch.uint8) for scale in scales)
    scale = torch.where(four, scale4, scale6).view(torch.float8_e4m3fn)
    return torch.where(four.unsqueeze(-1), codes4, codes6).flatten(-2), scale


def _error(x: Tensor, codes: Tensor, scale: Tensor, s_enc: Tensor, amax: Tensor, how: FourOverSix) -> Tensor:
    """Error of each block of 16 elements of a row, [rows, K/16]."""
    value = in_blocks(code_values(codes, torch.float32), BLOCK).mul_(scale.to(torch.float32).unsqueeze(-1))
    x = in_blocks(x, BLOCK)
    if how.fast_error:
        d = value.sub_(x * s_enc.unsqueeze(-1))
    else:
        # divide by a tensor: on a GPU torch divides by a number through its reciprocal, which rounds twice
        d = value.mul_(amax.unsqueeze(-1)).div_(torch.full((), how.outer_max, device=x.device)).sub_(x)
    d = d.abs_() if how.err == "mae" else d.mul_(d)
    error = torch.zeros_like(d[..., 0])
    for column in d.unbind(-1):
        error += column
    return error


def _over_rows(error: Tensor) -> Tensor:
    """Errors [rows, G] summed over each 16 rows by the tree of the kernel's warp reduction, repeated over the rows."""
    rows, groups = error.shape
    part = error.view(rows // BLOCK, BLOCK, groups)
    for half in (8, 4, 2, 1):
        part = part[:, :half] + part[:, half:]
    return part.expand(-1, BLOCK, -1).reshape(rows, groups)
