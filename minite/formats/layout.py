"""The order in which block scales lie in memory: "linear" [rows, G], or "swizzled" as FP4 tensor cores read them.

Swizzled: tiles of 128 rows x 4 scales, 512 bytes each, tiles along G fastest. Within a tile row r and scale g lie at

    (r % 32) * 16 + (r // 32) * 4 + g

(CUTLASS sm100_blockscaled_layout.hpp:46-58, "SfKMajorAtom"; the same in cuBLAS, TransformerEngine and FlashInfer).
Rows are padded to 128 and G to 4, with zero bytes.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite.formats.errors import FormatError

TILE_ROWS = 128
TILE_COLUMNS = 4


def padded_shape(rows: int, columns: int) -> tuple[int, int]:
    """Rows and columns of a scale matrix after padding to whole tiles."""
    return -(-rows // TILE_ROWS) * TILE_ROWS, -(-columns // TILE_COLUMNS) * TILE_COLUMNS


def swizzle(scales: Tensor) -> Tensor:
    """Linear scales [.., rows, G] (any one-byte dtype) -> swizzled bytes, flat: [.., padded rows * padded G]."""
    _check_bytes(scales)
    rows, columns = scales.shape[-2:]
    padded_rows, padded_columns = padded_shape(rows, columns)
    lead = scales.shape[:-2]
    padded = torch.zeros(*lead, padded_rows, padded_columns, dtype=torch.uint8, device=scales.device)
    padded[..., :rows, :columns] = scales.view(torch.uint8)
    tiles = padded.view(*lead, padded_rows // TILE_ROWS, 4, 32, padded_columns // TILE_COLUMNS, TILE_COLUMNS)
    return tiles.movedim(-2, -4).transpose(-3, -2).reshape(*lead, -1).view(scales.dtype)


def unswizzle(swizzled: Tensor, rows: int, columns: int) -> Tensor:
    """The inverse: [.., padded rows * padded G] -> [.., rows, columns], without the padding."""
    _check_bytes(swizzled)
    padded_rows, padded_columns = padded_shape(rows, columns)
    if swizzled.shape[-1] != padded_rows * padded_columns:
        want = f"{padded_rows * padded_columns} bytes for {rows} x {columns} scales"
        raise FormatError(f"layout.unswizzle: got {swizzled.shape[-1]} bytes; expected {want}")
    lead = swizzled.shape[:-1]
    tiles = swizzled.view(torch.uint8).reshape(
        *lead, padded_rows // TILE_ROWS, padded_columns // TILE_COLUMNS, 32, 4, TILE_COLUMNS
    )
    padded = tiles.transpose(-3, -2).movedim(-4, -2).reshape(*lead, padded_rows, padded_columns)
    return padded[..., :rows, :columns].contiguous().view(swizzled.dtype)


def _check_bytes(scales: Tensor) -> None:
    if scales.element_size() != 1:
        raise FormatError(f"layout: dtype {scales.dtype}; expected a one-byte dtype (float8_e4m3fn, uint8)")
