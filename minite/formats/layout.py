"""The order in which block scales lie in memory: "linear" [rows, G], or "swizzled" as FP4 tensor cores read them.

Tiles of rows x 4 scales, tiles along G fastest; rows are padded to whole tiles and G to 4, with zero bytes.

    128x4   512-byte tiles; row r, scale g of a tile at (r % 32) * 16 + (r // 32) * 4 + g
            CUTLASS sm100_blockscaled_layout.hpp:46-58 ("SfKMajorAtom"), cuBLAS, TransformerEngine, FlashInfer
    8x4     32-byte tiles; row r, scale g at r * 4 + g
            FlashInfer and TensorRT-LLM quantization_utils.cuh (get_sf_out_offset_8x4): kernels for few rows

In a grouped GEMM the scales of every expert are padded by themselves, so expert e starts at

    sum over i < e of roundup(rows_i, 128) * roundup(G, 4)

(TransformerEngine cublaslt_grouped_gemm.cu:1138, CUTLASS's per-group layouts).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite.formats.errors import FormatError

TILE_COLUMNS = 4
_TILE_ROWS = {"128x4": 128, "8x4": 8}


def padded_shape(rows: int, columns: int, tile: str = "128x4") -> tuple[int, int]:
    """Rows and columns of a scale matrix after padding to whole tiles."""
    height = _tile_rows(tile)
    return -(-rows // height) * height, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def swizzle(scales: Tensor, tile: str = "128x4") -> Tensor:
    """Linear scales [.., rows, G] (any one-byte dtype) -> swizzled bytes, flat: [.., padded rows * padded G]."""
    _check_bytes(scales)
    rows, columns = scales.shape[-2:]
    padded_rows, padded_columns = padded_shape(rows, columns, tile)
    lead = scales.shape[:-2]
    padded = torch.zeros(*lead, padded_rows, padded_columns, dtype=torch.uint8, device=scales.device)
    padded[..., :rows, :columns] = scales.view(torch.uint8)
    if tile == "8x4":
        tiles = padded.view(*lead, padded_rows // 8, 8, padded_columns // TILE_COLUMNS, TILE_COLUMNS)
        return tiles.transpose(-3, -2).reshape(*lead, -1).view(scales.dtype)
    tiles = padded.view(*lead, padded_rows // 128, 4, 32, padded_columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.movedim(-2, -4).transpose(-3, -2).reshape(*lead, -1).view(scales.dtype)


def unswizzle(swizzled: Tensor, rows: int, columns: int, tile: str = "128x4") -> Tensor:
    """The inverse: [.., padded rows * padded G] -> [.., rows, columns], without the padding."""
    _check_bytes(swizzled)
    padded_rows, padded_columns = padded_shape(rows, columns, tile)
    if swizzled.shape[-1] != padded_rows * padded_columns:
        want = f"{padded_rows * padded_columns} bytes for {rows} x {columns} scales"
        raise FormatError(f"layout.unswizzle: got {swizzled.shape[-1]} bytes; expected {want}")
    lead = swizzled.shape[:-1]
    data = swizzled.view(torch.uint8)
    if tile == "8x4":
        tiles = data.reshape(*lead, padded_rows // 8, padded_columns // TILE_COLUMNS, 8, TILE_COLUMNS)
        padded = tiles.transpose(-3, -2).reshape(*lead, padded_rows, padded_columns)
    else:
        tiles = data.reshape(*lead, padded_rows // 128, padded_columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS)
        padded = tiles.transpose(-3, -2).movedim(-4, -2).reshape(*lead, padded_rows, padded_columns)
    return padded[..., :rows, :columns].contiguous().view(swizzled.dtype)


def expert_offsets(rows_E: Tensor, columns: int, tile: str = "128x4") -> Tensor:
    """Where each expert's swizzled scales begin, and the end: int64 [E + 1] bytes, on the device of integer rows_E."""
    height = _tile_rows(tile)
    width = -(-columns // TILE_COLUMNS) * TILE_COLUMNS
    sizes = (rows_E.to(torch.int64) + (height - 1)) // height * (height * width)
    return torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))


def swizzle_experts(scales_RG: Tensor, rows_E: Tensor, tile: str = "128x4") -> Tensor:
    """Linear scales [R, G] of rows sorted by expert -> one flat buffer, each expert padded and swizzled by itself.

    rows_E: integers that sum to R. Reads them on the host, once.
    """
    sizes = rows_E.tolist()
    if sum(sizes) != scales_RG.shape[0]:
        raise FormatError(f"layout.swizzle_experts: rows_E sums to {sum(sizes)}; expected {scales_RG.shape[0]} rows")
    parts = torch.split(scales_RG.view(torch.uint8), sizes)
    return torch.cat([swizzle(part, tile) for part in parts]).view(scales_RG.dtype)


def unswizzle_experts(swizzled: Tensor, rows_E: Tensor, columns: int, tile: str = "128x4") -> Tensor:
    """The inverse: flat buffer -> linear scales [R, columns]."""
    ends = expert_offsets(rows_E, columns, tile).tolist()
    if swizzled.shape != (ends[-1],):
        got = f"got {list(swizzled.shape)} bytes"
        raise FormatError(f"layout.unswizzle_experts: {got}; expected [{ends[-1]}] for these rows_E")
    data = swizzled.view(torch.uint8)
    parts = [
        unswizzle(data[start:end], rows, columns, tile)
        for start, end, rows in zip(ends, ends[1:], rows_E.tolist(), strict=False)
    ]
    return torch.cat(parts).view(swizzled.dtype)


def _tile_rows(tile: str) -> int:
    if tile not in _TILE_ROWS:
        raise FormatError(f"layout: tile {tile!r}; expected one of {', '.join(_TILE_ROWS)}")
    return _TILE_ROWS[tile]


def _check_bytes(scales: Tensor) -> None:
    if scales.element_size() != 1:
        raise FormatError(f"layout: dtype {scales.dtype}; expected a one-byte dtype (float8_e4m3fn, uint8)")
