"""FP8: E4M3 elements with float32 scales per tensor (or expert), per row, or per block.

    scale   who shares it                         kept as               for
    tensor  all of x; one each with "expert"      amax [] | [E]         weights (ModelOpt, vLLM)
    row     a row of x: a token                   amax [.., rows]       inputs
    1x128   128 neighbours of a row               block_scale           inputs (DeepSeek-V3)
    128x128 a tile, cut off at the borders of x   block_scale           weights (DeepSeek-V3: weight_scale_inv)

All float32, round to nearest, true divisions, as ModelOpt (qtensor/fp8_tensor.py) and DeepSeek-V3 (kernel.py) do:

    s = amax / 448;  1 where that is 0
    code = e4m3(x / s)
    value = code * s
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from minite.formats.checks import INPUT_DTYPES, check_finite, given_amax
from minite.formats.errors import FormatError
from minite.formats.qtensor import QTensor
from minite.formats.rounding import E4M3_MAX, e4m3

BLOCK = 128
_BLOCKS = {"1x128": (1, BLOCK), "128x128": (BLOCK, BLOCK)}
_SCALES = ("tensor", "expert", "row", *_BLOCKS)
_OPERANDS = {"fp8_tensor": "tensor", "fp8_row": "row", "fp8_1x128": "1x128", "fp8_128x128": "128x128"}


def quantize(x: Tensor, scale: str, *, amax: Tensor | None = None, name: str = "tensor") -> QTensor:
    """Quantize x [.., rows, K] (bfloat16, float16 or float32). scale: see the table; "expert" is for x [E, N, K].

    amax: float32, replaces the measured amax of "tensor", "expert" and "row"; not below it.
    Raises FormatError, NonFiniteError.
    """
    if x.dtype not in INPUT_DTYPES or x.ndim < 2 or not x.shape[-1]:
        got = f"{x.dtype} {list(x.shape)}"
        raise FormatError(f"fp8: {name}: {got}; expected bfloat16, float16 or float32 [.., rows, K]")
    if scale not in _SCALES or (scale == "expert" and x.ndim != 3):
        want = f"one of {', '.join(_SCALES)}; expert needs [E, N, K]"
        raise FormatError(f"fp8: {name}: scale {scale!r} of a {x.ndim}-D tensor; expected {want}")
    if scale in _BLOCKS and amax is not None:
        raise FormatError(f"fp8: {name}: got an amax, but {scale} scales have no outer scale; see formats.operand_amax")
    x32 = x.detach().to(torch.float32)
    measured = _amax(x32, scale)
    check_finite(x, measured, "fp8", name)
    shape = tuple(x.shape)
    if scale in _BLOCKS:
        factor = _scale_of(measured)
        codes = e4m3(x32 / _spread(factor, shape, _BLOCKS[scale])).view(torch.uint8)
        return QTensor("fp8", codes, factor, None, shape, _BLOCKS[scale], outer_max=E4M3_MAX)
    outer = measured if amax is None else given_amax(amax, measured, "fp8", name)
    codes = e4m3(x32 / _scale_of(_per_row(outer, x.ndim))).view(torch.uint8)
    block = (1 if scale == "row" else shape[-2], shape[-1])
    return QTensor("fp8", codes, None, outer, shape, block, outer_max=E4M3_MAX)


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [*shape]: code * s in float32, then cast to dtype."""
    values = q.codes.view(torch.float8_e4m3fn).to(torch.float32)
    if q.block_scale is not None:
        return values.mul_(_spread(q.block_scale, q.shape, q.block)).to(dtype)
    assert q.amax is not None
    return values.mul_(_scale_of(_per_row(q.amax, len(q.shape)))).to(dtype)


def block_scaled(q: QTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """codes, times block scales where there are any: [*shape], without the outer scale.

    Codes alone are exact in any dtype. Times a float32 block scale they need 28 bits: exact in float64, else one
    rounding to float32 and one to dtype.
    """
    base = torch.float64 if dtype == torch.float64 else torch.float32
    values = q.codes.view(torch.float8_e4m3fn).to(base)
    if q.block_scale is not None:
        values *= _spread(q.block_scale, q.shape, q.block).to(base)
    return values.to(dtype)


def quantize_operand(
    x: Tensor, how: str, *, amax: Tensor | None, generator: torch.Generator | None, name: str
) -> QTensor:
    """quantize() as an operand name says; [E, N, K] weights get one outer scale per expert."""
    return quantize(x, _scale_for(how, x), amax=amax, name=name)


def operand_amax(x: Tensor, how: str) -> Tensor | None:
    """The outer amax that quantize_operand measures: float32 [] | [E] | [.., rows]; None for block scales."""
    scale = _scale_for(how, x)
    return None if scale in _BLOCKS else _amax(x.detach().to(torch.float32), scale)


def _scale_for(how: str, x: Tensor) -> str:
    scale = _OPERANDS[how]
    return "expert" if scale == "tensor" and x.ndim == 3 else scale


def _amax(x: Tensor, scale: str) -> Tensor:
    """float32 [] | [E] | [.., rows] | [.., row blocks, column blocks]; NaN and Inf survive."""
    if scale in _BLOCKS:
        rows, columns = _BLOCKS[scale]
        x = pad(x, (0, -x.shape[-1] % columns, 0, -x.shape[-2] % rows))
        tiles = x.view(*x.shape[:-2], x.shape[-2] // rows, rows, x.shape[-1] // columns, columns)
        return tiles.abs().amax((-3, -1))
    if scale == "row":
        return x.abs().amax(-1)
    if not x.numel():
        return x.new_zeros(x.shape[:1] if scale == "expert" else ())
    return x.abs().flatten(1).amax(1) if scale == "expert" else x.abs().amax()


def _scale_of(amax: Tensor) -> Tensor:
    """s of the module docstring."""
    scale = amax / torch.full((), E4M3_MAX, device=amax.device)  # a number would be a reciprocal on a GPU
    return torch.where(scale == 0, torch.ones_like(scale), scale)


def _spread(scale: Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> Tensor:
    """Block scales [.., row blocks, column blocks] repeated over their blocks: [*shape]."""
    rows, columns = shape[-2:]
    return scale.repeat_interleave(block[0], -2)[..., :rows, :].repeat_interleave(block[1], -1)[..., :columns]


def _per_row(amax: Tensor, ndim: int) -> Tensor:
    """amax [] | [E] | [.., rows] shaped to broadcast with [.., rows, K]."""
    return amax if amax.ndim == 0 else amax.reshape(*amax.shape, *[1] * (ndim - amax.ndim))
