"""NVFP4: E2M1 codes, one E4M3 scale per block, one FP32 outer scale per tensor, expert or row.

The arithmetic and its order are those of TransformerEngine's kernels (core_nvfp4.cuh:40-96 and
quantize_transpose_vector_blockwise_fp4.cu:172-201 at d0067d0). All float32, round to nearest even, no fused
multiply-add, no approximate reciprocal; amax is over what shares an outer scale, amax_b over a block:

    S_enc = min(2688 / amax, FLT_MAX);  1 where amax == 0 or S_enc == 0
    s_b   = e4m3(min(amax_b * (S_enc * fl(1/6)), FLT_MAX))          saturates at 448, may be 0
    enc_b = min(1 / (float(s_b) * (1 / S_enc)), FLT_MAX)
    code  = e2m1(x * enc_b)

Reading back (dequantize_nvfp4.cuh:67-77): code * ((s_b * amax) * fl(1/2688)).

Edges follow from this and are kept as the kernels have them: -0 keeps its sign (code 8); a zero tensor has S_enc 1,
scales 0, codes 0 or 8; a block whose scale underflows to 0 has saturated codes and reads back as 0.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from minite.formats.errors import FormatError, NonFiniteError
from minite.formats.qtensor import QTensor, in_blocks
from minite.formats.rounding import E2M1_VALUES, e2m1_code, e4m3

BLOCK = 16
OUTER_MAX = 2688.0  # 6 * 448: the amax of a tensor maps to the largest code times the largest block scale
OUTER_RECIPROCAL = 1 / OUTER_MAX  # used only as float32
FLT_MAX = torch.finfo(torch.float32).max
CHUNK = 2**18  # elements worked on at once on a CPU

_BLOCKS = {(1, BLOCK), (BLOCK, BLOCK)}
_OUTERS = ("tensor", "expert", "row")
_INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_OPERANDS = {  # operand name -> block, outer scale of a matrix
    "nvfp4_1d": ((1, BLOCK), "tensor"),
    "nvfp4_2d": ((BLOCK, BLOCK), "tensor"),
    "nvfp4_row": ((1, BLOCK), "row"),
    "nvfp4_tensor": ((1, BLOCK), "tensor"),
}


def quantize(
    x: Tensor,
    block: tuple[int, int] = (1, BLOCK),
    outer: str = "tensor",
    four_over_six: str | None = None,
    rounding: str = "rne",
    generator: torch.Generator | None = None,
    *,
    amax: Tensor | None = None,
    name: str = "tensor",
    nonfinite: str = "error",
) -> QTensor:
    """Quantize x [.., rows, K] (bfloat16, float16 or float32; K % 16 == 0, and rows % 16 == 0 for 16x16 blocks).

    outer: what shares one outer scale. "tensor", "row", or "expert" for x [E, N, K] (one per E).
    amax: float32, replaces the measured amax; [] | [E] | [.., rows] by outer. For a fusion group or a TP shard, whose
        outer scale comes from more than x. It must not be below the amax of x.
    name: of the tensor, for error messages.
    nonfinite: "error" raises NonFiniteError on NaN or Inf in x; "te" does what the kernels do (amax skips NaN, an
        infinite amax gives S_enc = 1, NaN becomes code 7).
    four_over_six, rounding, generator: only None, "rne" and None exist so far.

    Zero rows are fine. Raises FormatError for a shape, dtype or option that does not fit.
    """
    _check_options(four_over_six, rounding, nonfinite)
    _check_shape(x, block, outer, name)
    block_amax = _block_amax(x, block, skip_nan=nonfinite == "te")
    measured = _outer_amax(block_amax, outer)
    if nonfinite == "error":
        _check_finite(x, measured, name)
    outer_amax = measured if amax is None else _given_amax(amax, measured, name)
    scale, encode = _block_scale(block_amax, _per_block(outer_amax, x.ndim))
    return QTensor("nvfp4", _packed_codes(x, encode), scale, outer_amax, tuple(x.shape), block)


def dequantize(q: QTensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Values [*shape]: code * ((block scale * amax) * fl(1/2688)) in float32, then cast to dtype."""
    assert q.amax is not None
    factor = q.block_scale.to(torch.float32) * _per_block(q.amax, len(q.shape)) * OUTER_RECIPROCAL
    return _times_blocks(_code_values(q.codes, torch.float32), factor).to(dtype)


def block_scaled(q: QTensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """codes x block scales [*shape], without the outer scale. Exact in bfloat16 and wider: 6 significant bits."""
    base = dtype if dtype in (torch.bfloat16, torch.float32) else torch.float32
    return _times_blocks(_code_values(q.codes, base), q.block_scale.to(base)).to(dtype)


def quantize_operand(
    x: Tensor, how: str, *, amax: Tensor | None, generator: torch.Generator | None, name: str
) -> QTensor:
    """quantize() with block and outer scale of an operand name; [E, N, K] weights get one outer scale per expert."""
    block, outer = _OPERANDS[how]
    return quantize(x, block, _outer_for(outer, x), generator=generator, amax=amax, name=name)


def operand_amax(x: Tensor, how: str) -> Tensor:
    """The amax that quantize_operand measures: float32 [] | [E] | [.., rows]. To be max-reduced over a TP group."""
    block, outer = _OPERANDS[how]
    _check_shape(x, block, _outer_for(outer, x), how)
    return _outer_amax(_block_amax(x, (1, BLOCK), skip_nan=False), _outer_for(outer, x))


def pack(codes: Tensor) -> Tensor:
    """Codes uint8 [.., K] -> bytes [.., K/2], low nibble = even column."""
    pairs = codes.contiguous().view(torch.int16)  # little endian: low byte = even column
    return (pairs | (pairs >> 4)).to(torch.uint8)


def unpack(packed: Tensor) -> Tensor:
    """Bytes [.., K/2] -> codes uint8 [.., K]."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def _outer_for(outer: str, x: Tensor) -> str:
    return "expert" if outer == "tensor" and x.ndim == 3 else outer


def _row_chunks(x: Tensor, columns: int) -> tuple[Tensor, ...]:
    """The rows of x [.., rows, *] as [rows, *], in chunks whose float32 temporaries [rows, columns] stay in cache.

    Three times faster on a CPU at a million elements. One chunk on a GPU, where each would cost kernel launches.
    """
    rows = x.detach().flatten(0, -2)
    return torch.split(rows, max(1, CHUNK // columns if x.device.type == "cpu" else rows.shape[0]))


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


def _packed_codes(x: Tensor, encode: Tensor) -> Tensor:
    """Packed codes [.., rows, K/2] of x [.., rows, K] times the encode factors [.., rows, K/16] of its blocks."""
    k = x.shape[-1]
    parts = []
    for rows, factors in zip(_row_chunks(x, k), _row_chunks(encode, k), strict=True):
        scaled = in_blocks(rows.to(torch.float32), BLOCK) * factors.unsqueeze(-1)
        parts.append(pack(e2m1_code(scaled).flatten(-2)))
    return torch.cat(parts).view(*x.shape[:-1], k // 2)


def _outer_amax(block_amax: Tensor, outer: str) -> Tensor:
    if outer == "row":
        return block_amax.amax(-1)
    if outer == "expert":
        return block_amax.flatten(1).amax(1) if block_amax.shape[1] else block_amax.new_zeros(block_amax.shape[0])
    return block_amax.amax() if block_amax.numel() else block_amax.new_zeros(())


def _per_block(amax: Tensor, ndim: int) -> Tensor:
    """amax [] | [E] | [.., rows] shaped to broadcast with block scales of an ndim-dimensional tensor."""
    return amax if amax.ndim == 0 else amax.reshape(*amax.shape, *[1] * (ndim - amax.ndim))


def _block_scale(block_amax: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 decode scale and float32 encode factor of each block, in the order of the module docstring."""
    # torch computes scalar / tensor as scalar * reciprocal(tensor), which rounds twice: divide tensors instead
    s_enc = (torch.full_like(amax, OUTER_MAX) / amax).clamp_(max=FLT_MAX)
    s_enc = torch.where((amax == 0) | (s_enc == 0), torch.ones_like(s_enc), s_enc)
    scale = e4m3((block_amax * (s_enc * (1 / 6))).clamp_(max=FLT_MAX))
    encode = (scale.to(torch.float32) * s_enc.reciprocal()).reciprocal_().clamp_(max=FLT_MAX)
    return scale, encode


def _times_blocks(values: Tensor, factor: Tensor) -> Tensor:
    """values [.., K] in place times factor [.., K/16], each over its 16 columns."""
    in_blocks(values, BLOCK).mul_(factor.unsqueeze(-1))
    return values


def _code_values(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """E2M1 values [.., K] of packed codes. One table look-up per byte fetches both values."""
    table = _byte_table(packed.device, dtype)
    pairs = table.index_select(0, packed.flatten().to(torch.int32))
    return pairs.view(dtype).view(*packed.shape[:-1], 2 * packed.shape[-1])


@lru_cache(maxsize=8)
def _byte_table(device: torch.device, dtype: torch.dtype) -> Tensor:
    """Both values of each of the 256 bytes, seen as one integer (int32 for bfloat16, int64 for float32)."""
    positive = torch.tensor(E2M1_VALUES, dtype=dtype, device=device)
    by_code = torch.cat((positive, -positive))
    both = by_code[unpack(torch.arange(256, dtype=torch.uint8, device=device).unsqueeze(-1)).long()]
    return both.contiguous().view(torch.int32 if dtype == torch.bfloat16 else torch.int64).flatten()


def _check_options(four_over_six: str | None, rounding: str, nonfinite: str) -> None:
    if four_over_six is not None:
        raise NotImplementedError(f"nvfp4.quantize: four_over_six={four_over_six!r} is not built; only None is")
    if rounding != "rne":
        raise NotImplementedError(f"nvfp4.quantize: rounding={rounding!r} is not built; only 'rne' is")
    if nonfinite not in ("error", "te"):
        raise FormatError(f"nvfp4.quantize: nonfinite={nonfinite!r}; expected 'error' or 'te'")


def _check_shape(x: Tensor, block: tuple[int, int], outer: str, name: str) -> None:
    if block not in _BLOCKS:
        raise FormatError(f"nvfp4: {name}: block {block}; expected (1, 16) or (16, 16)")
    if outer not in _OUTERS or (outer == "expert" and x.ndim != 3):
        want = "tensor, row, or expert (3-D)"
        raise FormatError(f"nvfp4: {name}: outer {outer!r} of a {x.ndim}-D tensor; expected {want}")
    if x.dtype not in _INPUT_DTYPES:
        raise FormatError(f"nvfp4: {name}: dtype {x.dtype}; expected bfloat16, float16 or float32")
    if x.ndim < 2 or x.shape[-1] % BLOCK or x.shape[-2] % block[0] or not x.shape[-1]:
        want = f"[.., rows % {block[0]} == 0, K % {BLOCK} == 0]"
        raise FormatError(f"nvfp4: {name}: shape {list(x.shape)}; expected {want}; pad it or leave this module in bf16")


def _check_finite(x: Tensor, amax: Tensor, name: str) -> None:
    if bool(torch.isfinite(amax).all()):  # NaN and Inf both survive the max
        return
    bad = (~torch.isfinite(x)).nonzero()
    first = bad[0].tolist()
    raise NonFiniteError(
        f"nvfp4: {name}: {x[tuple(first)].item()} at {first} (first of {len(bad)} non-finite values in "
        f"{list(x.shape)}); quantize needs finite values: look for the step that made it"
    )


def _given_amax(amax: Tensor, measured: Tensor, name: str) -> Tensor:
    if amax.numel() != measured.numel() or amax.dtype != torch.float32:
        got = f"{amax.dtype} {list(amax.shape)}"
        raise FormatError(f"nvfp4: {name}: amax is {got}; expected float32 {list(measured.shape)}")
    amax = amax.to(measured.device).reshape(measured.shape)
    if bool((measured > amax).any()):
        raise FormatError(f"nvfp4: {name}: given amax is below the largest value of the tensor; take the group's max")
    return amax
