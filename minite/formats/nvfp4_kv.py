"""NVFP4 storage of keys and values: E2M1 codes and one E4M3 scale per 16 values of a head; 4.5 bits a value.

The outer scale is a constant of the layer, given and not measured, so that a token's codes depend on that token alone
and a cache can be appended to. The arithmetic is nvfp4.py's with S_enc = 1 / outer_scale, float32:

    s_b  = e4m3(amax_b * (S_enc * fl(1/6)))       saturates at 448: magnitudes above 2688 * outer_scale do
    code = e2m1(x * min(1 / (float(s_b) * (1 / S_enc)), FLT_MAX))
    read: (code * s_b) * outer_scale

outer_scale 1, the default, fits keys after an RMS norm: what is below 0.006 in a block of its own becomes 0.
NaN makes its block NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite.formats.e2m1 import code_values, pack
from minite.formats.errors import FormatError
from minite.formats.nvfp4_scales import block_scale, encode_factor
from minite.formats.qtensor import in_blocks
from minite.formats.rounding import e2m1_code

BLOCK = 16


def quantize_kv(x_THD: Tensor, outer_scale: float = 1.0) -> tuple[Tensor, Tensor]:
    """Keys or values, bfloat16 or float32 [T, H, D % 16 == 0] -> codes uint8 [T, H, D/2], scales e4m3 [T, H, D/16]."""
    if not x_THD.is_floating_point() or x_THD.shape[-1] % BLOCK or outer_scale <= 0:
        got = f"{x_THD.dtype} {list(x_THD.shape)}, outer_scale {outer_scale}"
        raise FormatError(f"nvfp4_kv: {got}; expected floating point [.., D % {BLOCK} == 0] and a positive scale")
    x = in_blocks(x_THD.detach().to(torch.float32), BLOCK)
    s_enc = torch.full((), outer_scale, device=x.device).reciprocal()
    scale = block_scale(x.abs().amax(-1), s_enc)
    codes = pack(e2m1_code(x * encode_factor(scale, s_enc).unsqueeze(-1)).flatten(-2))
    return codes, scale


def dequantize_kv(codes_THd: Tensor, scale_THG: Tensor, dtype: torch.dtype, outer_scale: float = 1.0) -> Tensor:
    """What attention reads, [T, H, D]: (code * scale) * outer_scale in float32; exact in BF16 if outer_scale is 2^i."""
    values = in_blocks(code_values(codes_THd, torch.float32), BLOCK)
    return values.mul_(scale_THG.to(torch.float32).unsqueeze(-1)).mul_(outer_scale).flatten(-2).to(dtype)
