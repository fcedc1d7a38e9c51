"""NVFP4 quantizer: block maxima, then codes. Byte for byte formats.nvfp4.quantize.

The arithmetic, and its order, is the one in the docstring of formats/nvfp4.py.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from minite.backends.cpu.bits import F32, FLT_MAX, FLT_MAX_BITS, MAGNITUDE, U8, U32, U64, e2m1, e4m3, even_odd, spread
from minite.backends.cpu.compiled import inlined, kernel
from minite.formats.checks import check_finite, check_shape, given_amax
from minite.formats.nvfp4_scales import OUTER_MAX
from minite.formats.qtensor import QTensor

BLOCK = 16
SIXTH = F32(1 / 6)


def quantize(x: Tensor, block: tuple[int, int], outer: str, amax: Tensor | None) -> QTensor:
    """formats.nvfp4.quantize of x on a CPU, to nearest; 16x16 blocks not with outer "row"; amax finite if given."""
    check_shape(x, block, outer, "tensor")
    x_RK = _matrix(x)
    codes = torch.empty(*x.shape[:-1], x.shape[-1] // 2, dtype=torch.uint8)
    scale = torch.empty(*x.shape[:-1], x.shape[-1] // BLOCK, dtype=torch.uint8)
    measured = torch.zeros({"tensor": (), "expert": x.shape[:1], "row": x.shape[:-1]}[outer], dtype=torch.float32)
    by_row = outer == "row" and amax is None
    if by_row:
        largest = encode_rows(x_RK, _flat(measured), _rows(codes), _rows(scale))
    else:
        block_amax = np.empty((x_RK.shape[0] // block[0], x.shape[-1] // BLOCK), U32)
        largest = measure(x_RK, block[0], block_amax, _flat(measured).view(U32))
    if largest > FLT_MAX_BITS:
        check_finite(x, measured, "nvfp4", "tensor")
    outer_amax = measured if amax is None else given_amax(amax, measured, "nvfp4", "tensor")
    if not by_row:
        encode(x_RK, block[0], block_amax, _flat(outer_amax), _rows(codes), _rows(scale))
    return QTensor("nvfp4", codes, scale.view(torch.float8_e4m3fn), outer_amax, tuple(x.shape), block)


@kernel
def measure(x_RK, block_rows, amax_TG, amax_O):  # type: ignore[no-untyped-def]
    """max |x| of each block and of each of the O groups of tiles that share an outer scale; a tile is block_rows rows.

    Both as bits: amax_TG [tiles, G] is filled, amax_O comes as zeros. Returns the largest; NaN counts above Inf.
    """
    tiles = amax_TG.shape[0]
    each, largest = max(1, tiles // max(1, amax_O.shape[0])), U32(0)
    for tile in range(tiles):
        amax_G = amax_TG[tile]
        for g in range(amax_G.shape[0]):
            amax_G[g] = 0
        for row in range(tile * block_rows, (tile + 1) * block_rows):
            _raise_block_amax(x_RK, row, amax_G)
        tile_amax = _largest(amax_G)
        amax_O[tile // each] = max(amax_O[tile // each], tile_amax)
        largest = max(largest, tile_amax)
    return largest


@inlined
def _raise_block_amax(x_RK, row, amax_G):  # type: ignore[no-untyped-def]
    for g in range(amax_G.shape[0]):
        largest = amax_G[g]
        for j in range(8 * g, 8 * g + 8):
            even, odd = even_odd(x_RK, row, j)
            even, odd = U32(even & MAGNITUDE), U32(odd & MAGNITUDE)
            larger = even if even > odd else odd
            largest = largest if largest > larger else larger
        amax_G[g] = largest


@kernel
def encode(x_RK, block_rows, amax_TG, amax_O, codes_RB, scale_RG):  # type: ignore[no-untyped-def]
    """Codes [rows, K/2] and scale bytes [rows, G] from the block maxima (bits) and the outer amaxes (float32)."""
    tiles, g = amax_TG.shape
    each = max(1, tiles // max(1, amax_O.shape[0]))
    factor_G, factor_B = np.empty(g, F32), np.empty(4 * g, U64)
    for tile in range(tiles):
        first = tile * block_rows
        _scales(amax_TG[tile], amax_O[tile // each], scale_RG[first], factor_G)
        spread(factor_G, factor_B)
        for row in range(first, first + block_rows):
            for i in range(g):
                scale_RG[row, i] = scale_RG[first, i]
            _codes(x_RK, row, factor_B.view(F32), codes_RB[row])


@kernel
def encode_rows(x_RK, amax_R, codes_RB, scale_RG):  # type: ignore[no-untyped-def]
    """measure and encode of a row while it is in the cache, where each has its own outer amax: float32 [rows], filled.

    Returns the bits of the largest amax.
    """
    rows, g = scale_RG.shape
    amax_G, factor_G, factor_B, largest = np.empty(g, U32), np.empty(g, F32), np.empty(4 * g, U64), U32(0)
    for row in range(rows):
        for i in range(g):
            amax_G[i] = 0
        _raise_block_amax(x_RK, row, amax_G)
        row_amax = _largest(amax_G)
        largest = max(largest, row_amax)
        amax_R[row] = U32(row_amax).view(F32)
        _scales(amax_G, amax_R[row], scale_RG[row], factor_G)
        spread(factor_G, factor_B)
        _codes(x_RK, row, factor_B.view(F32), codes_RB[row])
    return largest


@inlined
def _largest(amax_G):  # type: ignore[no-untyped-def]
    largest = U32(0)
    for g in range(amax_G.shape[0]):
        largest = largest if largest > amax_G[g] else amax_G[g]
    return largest


@inlined
def _scales(amax_G, amax, scale_G, factor_G):  # type: ignore[no-untyped-def]
    """Block scales, and the factors that elements are multiplied with."""
    s_enc = F32(OUTER_MAX) / F32(amax)
    s_enc = s_enc if s_enc < FLT_MAX else FLT_MAX
    if amax == 0 or s_enc == 0:
        s_enc = F32(1)
    multiplier, s_dec = s_enc * SIXTH, F32(1) / s_enc
    for g in range(amax_G.shape[0]):
        byte, value = e4m3(U32(amax_G[g]).view(F32) * multiplier)
        factor = F32(1) / (value * s_dec)
        scale_G[g] = byte
        factor_G[g] = factor if factor < FLT_MAX else FLT_MAX


@inlined
def _codes(x_RK, row, factor_B, codes_B):  # type: ignore[no-untyped-def]
    """The packed codes of one row; a byte holds two neighbours. y has the sign of x."""
    for j in range(codes_B.shape[0]):
        even, odd = even_odd(x_RK, row, j)
        low = e2m1(U32(even & MAGNITUDE).view(F32) * factor_B[j])
        high = e2m1(U32(odd & MAGNITUDE).view(F32) * factor_B[j])
        signs = U32((even >> U32(28)) & U32(8)) | U32((odd >> U32(24)) & U32(0x80))
        codes_B[j] = U8(signs | U32(low) | U32(U32(high) << U32(4)))


def _matrix(x: Tensor) -> NDArray[np.generic]:
    """x [.., rows, K] as even_odd reads it. float16 is widened."""
    x = x.detach().contiguous()
    if x.dtype != torch.bfloat16:
        return _rows(x.to(torch.float32))
    if x.data_ptr() % 4:  # a view that begins between two words
        x = x.clone()
    return _rows(x.view(torch.int32)).view(U32)


def _rows(t: Tensor) -> NDArray[np.generic]:
    return t.flatten(0, -2).numpy()


def _flat(amax: Tensor) -> NDArray[np.float32]:
    return amax.reshape(-1).numpy()
