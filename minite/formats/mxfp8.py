"""MXFP8: E4M3 elements, one power-of-two (E8M0) scale per 32 columns, no outer scale.

Scale rule: TransformerEngine's (ptx::float_to_e8m0 in common/util/ptx.cuh, used by common/cast/mxfp8), which rounds
the exponent UP so that no element saturates. The floor(log2 amax) - 8 of the OCP MX 1.0 specification, section 6.3,
is another rule: it clips up to the top 1/8 of a block. All float32:

    e = e8m0_ceil(amax_b * fl(1/448))              biased exponent; scale = 2^(e - 127)
    code = e4m3(x * 2^(127 - e));  x * 1 where e == 0
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite.formats.checks import INPUT_DTYPES, check_finite
from minite.formats.errors import FormatError
from minite.formats.qtensor import QTensor, in_blocks
from minite.formats.rounding import E4M3_MAX, e4m3, e8m0_ceil

BLOCK = 32


def quantize(x: Tensor, *, name: str = "tensor") -> QTensor:
    """Quantize x [.., K] (bfloat16, float16 or float32; K % 32 == 0). Raises FormatError, NonFiniteError."""
    if x.dtype not in INPUT_DTYPES:
        raise FormatError(f"mxfp8: {name}: dtype {x.dtype}; expected bfloat16, float16 or float32")
    if x.ndim < 2 or x.shape[-1] % BLOCK or not x.shape[-1]:
        raise FormatError(f"mxfp8: {name}: shape {list(x.shape)}; expected [.., rows, K % {BLOCK} == 0]")
    x32 = in_blocks(x.detach().to(torch.float32), BLOCK)
    amax = x32.abs().amax(-1)
    check_finite(x, amax, "mxfp8", name)
    exponent = e8m0_ceil(amax * (1 / E4M3_MAX))
    codes = e4m3(x32 * _encode_factor(exponent).unsqueeze(-1)).flatten(-2).view(torch.uint8)
    return QTensor("mxfp8", codes, exponent.view(torch.float8_e8m0fnu), None, tuple(x.shape), (1, BLOCK))


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [*shape]: code * scale, exact in float32 above its subnormals, then cast to dtype."""
    assert q.block_scale is not None
    scale = q.block_scale.to(torch.float32)
    values = in_blocks(q.codes.view(torch.float8_e4m3fn).to(torch.float32), BLOCK)
    return values.mul_(scale.unsqueeze(-1)).flatten(-2).to(dtype)


def block_scaled(q: QTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """codes x block scales [*shape]: here the values themselves. Exact in bfloat16 (4 significant bits)."""
    return dequantize(q, dtype)


def quantize_operand(
    x: Tensor, how: str, *, amax: Tensor | None, generator: torch.Generator | None, name: str
) -> QTensor:
    """quantize() for operand "mxfp8". It has no outer scale, so an amax is a caller's mistake."""
    if amax is not None:
        raise FormatError(f"mxfp8: {name}: got an amax, but {how} has no outer scale; see formats.operand_amax")
    return quantize(x, name=name)


def operand_amax(x: Tensor, how: str) -> None:
    """None: MXFP8 has no outer scale."""


def _encode_factor(exponent: Tensor) -> Tensor:
    """2^(127 - e) as float32; 1 where e == 0 (as exp2f_rcp does), where every element rounds to 0 anyway."""
    factor = ((254 - exponent.to(torch.int32)) << 23).view(torch.float32)
    return torch.where(exponent == 0, torch.ones_like(factor), factor)
