"""torch.library operators that move the rows of experts: quantized tokens to them, results back."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.backends.cutlass import ops
from minite.backends.cutlass.checks import check_tensor
from minite.backends.cutlass.library import CombineCall, PermuteCall, for_device
from minite.errors import UserError

MAX_TOP = 32  # choices of a token: the lanes of a warp


@torch.library.custom_op("minite::nvfp4_permute", mutates_args=(), device_types="cuda")
def permute(
    codes: Tensor, scales: Tensor, amax: Tensor, source_row: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of what ops.quantize gave for tokens, one for each expert that takes them: row r is row source_row[r].

    codes uint8 [T, K/2], scales uint8 [T, K/16] in order, amax float32 [T]; source_row int64 [R], sorted by expert as
    ``offsets`` says. -> (codes uint8 [R, K/2], scales in the tiles of each expert, amax float32 [R]).
    """
    tokens, columns = scales.shape
    out = _permuted(codes, scales, amax, source_row, offsets)
    if len(source_row) == 0:
        return out
    for name, t, dtype, shape in (
        ("codes", codes, torch.uint8, (tokens, 8 * columns)),
        ("scales", scales, torch.uint8, (tokens, columns)),
        ("amax", amax, torch.float32, (tokens,)),
        ("source_row", source_row, torch.int64, (len(source_row),)),
    ):
        check_tensor(f"nvfp4_permute: {name}", t, dtype, shape, codes.device)
    call = PermuteCall(
        codes_in=codes.data_ptr(),
        scales_in=scales.data_ptr(),
        amax_in=amax.data_ptr(),
        source_row=source_row.data_ptr(),
        amax_out=out[2].data_ptr(),
        codes=out[0].data_ptr(),
        scales=ops._scales(out[1], True, offsets),
        stream=ops._stream(codes),
        rows=len(source_row),
        k=16 * columns,
    )
    with torch.cuda.device(codes.device):
        for_device(codes.device).permute(call)
    return out


@permute.register_fake
def _(
    codes: Tensor, scales: Tensor, amax: Tensor, source_row: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return _permuted(codes, scales, amax, source_row, offsets)


def _permuted(
    codes: Tensor, scales: Tensor, amax: Tensor, source_row: Tensor, offsets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    rows, columns = len(source_row), scales.shape[1]
    return codes.new_empty(rows, 8 * columns), ops._tiles(codes, rows, columns, offsets), amax.new_empty(rows)


@torch.library.custom_op("minite::moe_combine", mutates_args=(), device_types="cuda")
def combine(y_RH: Tensor, prob_Tk: Tensor, position_Tk: Tensor) -> Tensor:
    """BF16 [T, H]: the sum over a token's choices of prob * y[position], as layers.moe.moe_combine, to the bit.

    y BF16 [R, H], H % 8 == 0; prob float32 [T, k], k <= 32; position int32 [T, k], which ascends with the expert.
    """
    (tokens, top), width = prob_Tk.shape, y_RH.shape[1]
    if width % 8 or top > MAX_TOP:
        want = f"H % 8 == 0 and at most {MAX_TOP} choices"
        raise UserError(f"moe_combine: H is {width}, {top} choices; expected {want}; use precision.backend=triton")
    out_TH = y_RH.new_empty(tokens, width)
    if tokens == 0 or width == 0:
        return out_TH
    check_tensor("moe_combine: y", y_RH, torch.bfloat16, tuple(y_RH.shape), y_RH.device)
    check_tensor("moe_combine: prob", prob_Tk, torch.float32, (tokens, top), y_RH.device)
    check_tensor("moe_combine: position", position_Tk, torch.int32, (tokens, top), y_RH.device)
    call = CombineCall(
        y=y_RH.data_ptr(),
        prob=prob_Tk.data_ptr(),
        position=position_Tk.data_ptr(),
        out=out_TH.data_ptr(),
        stream=ops._stream(y_RH),
        tokens=tokens,
        width=width,
        top=top,
    )
    with torch.cuda.device(y_RH.device):
        for_device(y_RH.device).combine(call)
    return out_TH


@combine.register_fake
def _(y_RH: Tensor, prob_Tk: Tensor, position_Tk: Tensor) -> Tensor:
    return y_RH.new_empty(prob_Tk.shape[0], y_RH.shape[1])
