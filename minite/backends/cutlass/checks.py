"""What the kernels need of their operands. Looked at before anything is launched: device code cannot raise errors.

CUTLASS could check only sizes that the host knows; in a grouped GEMM these are on the device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite.config.operands import NATIVE_ROW, NATIVE_SUM
from minite.errors import UserError
from minite.formats import layout

ALIGNMENT = 16  # bytes, of a first element: TMA and 16-byte loads
_INT32 = 2**31
OTHER_BACKEND = "or use precision.backend=triton"


def check_sizes(what: str, m: int, n: int, k: int) -> None:
    """K % 32: rows of 4-bit codes start at 16 bytes. N % 8: rows of BF16 results do. Offsets of scales are int32."""
    if k % NATIVE_SUM:
        raise UserError(
            f"{what}: K is {k}; expected a multiple of {NATIVE_SUM}; pad the columns with zeros, {OTHER_BACKEND}"
        )
    if n % NATIVE_ROW:
        raise UserError(
            f"{what}: N is {n}; expected a multiple of {NATIVE_ROW}; pad the weight with zero rows, {OTHER_BACKEND}"
        )
    for letter, rows in (("M", m), ("N", n)):
        height, width = layout.padded_shape(rows, k // 16)
        if height >= _INT32 or height * width >= _INT32:
            raise UserError(
                f"{what}: {letter} x K is {rows} x {k}, so its block scales take {height * width} bytes; expected "
                f"fewer than {_INT32}, which CUTLASS counts in int32; split the rows"
            )


def check_tensor(what: str, x: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """A contiguous tensor of this dtype and shape on this device whose first element is aligned."""
    if x.device != device:
        raise UserError(f"{what}: is on {x.device}; expected {device}, where the first operand is; move it there")
    if x.dtype != dtype or tuple(x.shape) != shape:
        got, want = f"{x.dtype} {list(x.shape)}", f"{dtype} {list(shape)}"
        raise UserError(f"{what}: is {got}; expected {want}; quantize and prepare it with this backend")
    if not x.is_contiguous():
        raise UserError(f"{what}: has strides {list(x.stride())}; expected contiguous rows; call .contiguous()")
    if x.data_ptr() % ALIGNMENT and x.numel():
        raise UserError(f"{what}: begins at an odd address; expected a multiple of {ALIGNMENT} bytes; call .clone()")


def check_padding(what: str, tiles: Tensor, rows: int, k: int) -> None:
    """Columns that pad K / 16 to 4 hold zero scales. Waits for the device, so it is for weights, once per version.

    The tensor core multiplies padded columns too, codes 0 by whatever scale stands there; a NaN would spoil the row.
    """
    columns = k // 16
    padded_rows, padded_columns = layout.padded_shape(rows, columns)
    if columns == padded_columns:
        return
    whole = layout.unswizzle(tiles.view(torch.uint8), padded_rows, padded_columns)
    if bool((whole[..., :rows, columns:] != 0).any()):
        raise UserError(
            f"{what}: scales that pad {columns} columns to {padded_columns} are not zero; expected zeros; "
            "make them with formats.layout.swizzle"
        )
