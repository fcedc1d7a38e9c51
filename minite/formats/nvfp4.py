"""NVFP4: E2M1 codes, one E4M3 scale per block, one FP32 outer scale per tensor, expert or row.

The arithmetic and its order are those of TransformerEngine's kernels (core_nvfp4.cuh:40-96 and
quantize_transpose_vector_blockwise_fp4.cu:172-201 at d0067d0). All float32, round to nearest even, no fused
multiply-add, no approximate reciprocal; amax is over what shares an outer scale, amax_b over a block:

    S_enc = min(2688 / amax, FLT_MAX);  1 where amax == 0 or S_enc == 0
    s_b   = e4m3(min(amax_b * (S_enc * fl(1/6)), FLT_MAX))          saturates at 448, may be 0
    enc_b = min(1 / (float(s_b) * (1 / S_enc)), FLT_MAX)
    code  = e2m1(x * enc_b)

Reading back (dequantize_nvfp4.cuh:67-77): code * ((s_b * amax) * fl(1/2688)).

With four over six the block scale is another (four_over_six.py), and with its bound 256 the 2688 is 1536.

Edges follow from this and are kept as the kernels have them: -0 keeps its sign (code 8); a zero tensor has S_enc 1,
scales 0, codes 0 or 8; a block whose scale underflows to 0 has saturated codes and reads back as 0.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minite.formats import stochastic
from minite.formats.checks import check_finite, check_options, check_shape, given_amax
from minite.formats.e2m1 import code_values, pack, unpack
from minite.formats.four_over_six import FourOverSix, encode
from minite.formats.nvfp4_scales import FLT_MAX, OUTER_MAX, block_scale, encode_factor, outer_encode
from minite.formats.qtensor import QTensor, in_blocks
from minite.formats.rounding import e2m1_code

__all__ = [
    "BLOCK", "FLT_MAX", "OUTER_MAX", "PLAIN_OPERANDS", "FourOverSix", "block_scaled", "dequantize", "operand_amax",
    "operand_blocks", "pack", "quantize", "quantize_operand", "unpack",
]  # fmt: skip

BLOCK = 16
CHUNK = 2**18  # elements worked on at once on a CPU

_OPERANDS: dict[str, tuple[tuple[int, int], str, FourOverSix | None]] = {  # name -> block, outer scale of a matrix
    "nvfp4_1d": ((1, BLOCK), "tensor", None),
    "nvfp4_1d_4o6": ((1, BLOCK), "tensor", FourOverSix(err="mse", bound=448)),
    "nvfp4_2d": ((BLOCK, BLOCK), "tensor", None),
    "nvfp4_row": ((1, BLOCK), "row", None),
    "nvfp4_row_4o6": ((1, BLOCK), "row", FourOverSix(err="mse", bound=448)),
    "nvfp4_tensor": ((1, BLOCK), "tensor", None),
}
# Without four over six: what backends quantize by kernels of their own.
PLAIN_OPERANDS = tuple(name for name, (_, _, choice) in _OPERANDS.items() if choice is None)

ToCodes = Callable[[Tensor, int], Tensor]  # float32 scaled values, flat index of the first -> E2M1 codes


def quantize(
    x: Tensor,
    block: tuple[int, int] = (1, BLOCK),
    outer: str = "tensor",
    four_over_six: FourOverSix | None = None,
    rounding: str = "rne",
    generator: torch.Generator | None = None,
    *,
    amax: Tensor | None = None,
    name: str = "tensor",
    nonfinite: str = "error",
) -> QTensor:
    """Quantize x [.., rows, K] (bfloat16, float16 or float32; K % 16 == 0, and rows % 16 == 0 for 16x16 blocks).

    outer: what shares one outer scale. "tensor", "row", or "expert" for x [E, N, K] (one per E).
    four_over_six: choose between two scales for each block; see FourOverSix. Not with stochastic rounding.
    rounding: "rne", or "stochastic" for codes whose mean over seeds is the scaled value (see stochastic.py).
    generator: gives one seed per call to stochastic rounding, and nothing else; unused by "rne".
    amax: float32, replaces the measured amax; [] | [E] | [.., rows] by outer. For a fusion group or a TP shard, whose
        outer scale comes from more than x. It must not be below the amax of x.
    name: of the tensor, for error messages.
    nonfinite: "error" raises NonFiniteError on NaN or Inf in x; "te" does what the kernels do (amax skips NaN, an
        infinite amax gives S_enc = 1, NaN becomes code 7); "te_python" what TransformerEngine's Python reference does
        (a NaN amax makes every scale under it NaN, NaN and -0 become code 0).

    Zero rows are fine. Raises FormatError for a shape, dtype or option that does not fit.
    """
    check_options(four_over_six, rounding, generator, nonfinite)
    check_shape(x, block, outer, name)
    block_amax = _block_amax(x, block, skip_nan=nonfinite == "te")
    measured = _outer_amax(block_amax, outer)
    if nonfinite == "error":
        check_finite(x, measured, "nvfp4", name)
    outer_amax = measured if amax is None else given_amax(amax, measured, "nvfp4", name)
    to_codes = _to_codes(rounding, generator, nonfinite)
    per_block = _per_block(outer_amax, x.ndim)
    if four_over_six is not None:
        codes, scale = _four_over_six(x, block_amax, per_block, block[0], four_over_six, to_codes)
        return QTensor("nvfp4", codes, scale, outer_amax, tuple(x.shape), block, outer_max=four_over_six.outer_max)
    s_enc = outer_encode(per_block)
    scale = block_scale(block_amax, s_enc)
    codes = _packed_codes(x, encode_factor(scale, s_enc), to_codes)
    return QTensor("nvfp4", codes, scale, outer_amax, tuple(x.shape), block, outer_max=OUTER_MAX)


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [*shape]: code * ((block scale * amax) * fl(1 / outer_max)) in float32, then cast to dtype."""
    assert q.amax is not None
    factor = _scales(q).to(torch.float32) * _per_block(q.amax, len(q.shape)) * (1 / q.outer_max)
    return _times_blocks(code_values(q.codes, torch.float32), factor).to(dtype)


def block_scaled(q: QTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """codes x block scales [*shape], without the outer scale. Exact in bfloat16 and wider: 6 significant bits."""
    base = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
    return _times_blocks(code_values(q.codes, base), _scales(q).to(base)).to(dtype)


def quantize_operand(
    x: Tensor, how: str, *, amax: Tensor | None, generator: torch.Generator | None, name: str
) -> QTensor:
    """quantize() as an operand name says; [E, N, K] weights get one outer scale per expert."""
    (block, outer), four_over_six = operand_blocks(x, how), _OPERANDS[how][2]
    return quantize(x, block, outer, four_over_six, generator=generator, amax=amax, name=name)


def operand_amax(x: Tensor, how: str) -> Tensor:
    """The amax that quantize_operand measures: float32 [] | [E] | [.., rows]. To be max-reduced over a TP group."""
    block, outer = operand_blocks(x, how)
    check_shape(x, block, outer, how)
    return _largest(x.detach(), outer)


def operand_blocks(x: Tensor, how: str) -> tuple[tuple[int, int], str]:
    """Block and outer scale, as ``quantize`` takes them, of x under an operand's name."""
    block, outer, _ = _OPERANDS[how]
    return block, "expert" if outer == "tensor" and x.ndim == 3 else outer


def _scales(q: QTensor) -> Tensor:
    assert q.block_scale is not None and q.layout == "linear"
    return q.block_scale


def _to_codes(rounding: str, generator: torch.Generator | None, nonfinite: str) -> ToCodes:
    if rounding == "stochastic":
        assert generator is not None
        seed = stochastic.draw_seed(generator)
        return lambda y, first: stochastic.e2m1_code(
            y, stochastic.random_bits(seed, first, y.numel(), y.device).view(y.shape)
        )
    if nonfinite == "te_python":  # adding 0 turns -0 into 0
        return lambda y, _: e2m1_code(y.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf).add_(0.0))
    return lambda y, _: e2m1_code(y)


def _row_chunks(x: Tensor, columns: int, multiple: int = 1) -> tuple[Tensor, ...]:
    """The rows of x [.., rows, *] as [rows, *], in chunks whose float32 temporaries [rows, columns] stay in cache.

    Three times faster on a CPU at a million elements. One chunk on a GPU, where each would cost kernel launches.
    Chunks, but for the last, are a multiple of ``multiple`` rows.
    """
    rows = x.detach().flatten(0, -2)
    size = CHUNK // columns if x.device.type == "cpu" else rows.shape[0]
    return torch.split(rows, max(multiple, size - size % multiple))


def _block_amax(x: Tensor, block: tuple[int, int], *, skip_nan: bool) -> Tensor:
    """max |x| of each block, repeated over the rows of a 16x16 block: float32 [.., rows, K/16]."""
    parts = []
    for rows in _row_chunks(x, x.shape[-1]):
        magnitude = rows.to(torch.float32).abs()
        if skip_nan:
            magnitude = magnitude.nan_to_num(nan=0.0, posinf=torch.inf)
        parts.append(in_blocks(magnitude, BLOCK).amax(-1))
    amax = torch.cat(parts)
    if block[0] == BLOCK:
        amax = in_blocks(amax.t(), BLOCK).amax(-1).t().repeat_interleave(BLOCK, dim=0)
    return amax.view(*x.shape[:-1], x.shape[-1] // BLOCK)


def _packed_codes(x: Tensor, encode_factors: Tensor, to_codes: ToCodes) -> Tensor:
    """Packed codes [.., rows, K/2] of x [.., rows, K] times the encode factors [.., rows, K/16] of its blocks."""
    k, first = x.shape[-1], 0
    parts = []
    for rows, factors in zip(_row_chunks(x, k), _row_chunks(encode_factors, k), strict=True):
        scaled = in_blocks(rows.to(torch.float32), BLOCK) * factors.unsqueeze(-1)
        parts.append(pack(to_codes(scaled, first).flatten(-2)))
        first += rows.numel()
    return torch.cat(parts).view(*x.shape[:-1], k // 2)


def _four_over_six(
    x: Tensor, block_amax: Tensor, amax: Tensor, block_rows: int, how: FourOverSix, to_codes: ToCodes
) -> tuple[Tensor, Tensor]:
    """four_over_six.encode in chunks of rows: packed codes [.., rows, K/2] and block scales [.., rows, K/16]."""
    k = x.shape[-1]
    amax_rows = amax.expand(*x.shape[:-1], 1)
    chunks = [_row_chunks(t, k, multiple=block_rows) for t in (x, block_amax, amax_rows)]
    parts = [
        encode(rows.to(torch.float32), block_amax_rows, outer, block_rows, how, lambda y: to_codes(y, 0))
        for rows, block_amax_rows, outer in zip(*chunks, strict=True)
    ]
    codes, scale = (torch.cat(part) for part in zip(*parts, strict=True))
    return codes.view(*x.shape[:-1], k // 2), scale.view(*x.shape[:-1], k // BLOCK)


def _outer_amax(block_amax: Tensor, outer: str) -> Tensor:
    if outer == "row":
        return block_amax.amax(-1)
    if outer == "expert":
        return block_amax.flatten(1).amax(1) if block_amax.shape[1] else block_amax.new_zeros(block_amax.shape[0])
    return block_amax.amax() if block_amax.numel() else block_amax.new_zeros(())


def _largest(x: Tensor, outer: str) -> Tensor:
    """The outer amax of x without block maxima on the way: no float32 copy is made, which takes ten times as long."""
    if outer == "row":
        low, high = x.amin(-1), x.amax(-1)
    elif not x.numel():
        return torch.zeros(x.shape[:1] if outer == "expert" else (), device=x.device)
    else:
        low, high = (x.flatten(1).amin(1), x.flatten(1).amax(1)) if outer == "expert" else torch.aminmax(x)
    return torch.maximum(high, -low).abs().to(torch.float32)


def _per_block(amax: Tensor, ndim: int) -> Tensor:
    """amax [] | [E] | [.., rows] shaped to broadcast with block scales of an ndim-dimensional tensor."""
    return amax if amax.ndim == 0 else amax.reshape(*amax.shape, *[1] * (ndim - amax.ndim))


def _times_blocks(values: Tensor, factor: Tensor) -> Tensor:
    """values [.., K] in place times factor [.., K/16], each over its 16 columns."""
    in_blocks(values, BLOCK).mul_(factor.unsqueeze(-1))
    return values
