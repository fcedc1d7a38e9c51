"""A torch.library operator: RMS norm, alone or of a sum, and the row-scaled quantizer behind it in one kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.backends.cutlass import ops
from minite.backends.cutlass.checks import check_tensor
from minite.backends.cutlass.library import NormCall, for_device
from minite.errors import UserError


@torch.library.custom_op("minite::nvfp4_norm_quantize", mutates_args=(), device_types="cuda")
def norm_quantize(
    x: Tensor, addend: Tensor | None, weight: Tensor, eps: float, plain: bool, tiled: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """y = weight * t / sqrt(mean(t^2) + eps) of BF16 t [R, K], x or BF16(x + addend), rounded to BF16, then quantized.

    -> (t, empty without an addend; y, empty unless ``plain``; codes uint8 [R, K/2]; scales uint8 [R, K/16] or,
    ``tiled``, swizzled and flat; amax float32 [R] of y). Squares are summed in float64, so y is that of the backend
    triton, and codes, scales and amax are those of ops.quantize(y). weight BF16 [K]; UserError for K % 16 and for
    tensors of another kind.
    """
    out = _outputs(x, addend, plain, tiled)
    total, normed, codes, scales, amax = out
    rows, k = x.shape
    if rows == 0:
        return out
    for name, t, shape in (("x", x, (rows, k)), ("addend", addend, (rows, k)), ("weight", weight, (k,))):
        if t is not None:
            check_tensor(f"nvfp4_norm_quantize: {name}", t, torch.bfloat16, shape, x.device)
    call = NormCall(
        x=x.data_ptr(),
        addend=ops._address(addend),
        weight=weight.data_ptr(),
        total=None if addend is None else total.data_ptr(),
        plain=normed.data_ptr() if plain else None,
        amax_out=amax.data_ptr(),
        codes=codes.data_ptr(),
        scales=ops._scales(scales, tiled, None),
        stream=ops._stream(x),
        rows=rows,
        k=k,
        eps=eps,
    )
    with torch.cuda.device(x.device):
        for_device(x.device).norm_quantize(call)
    return out


@norm_quantize.register_fake
def _(
    x: Tensor, addend: Tensor | None, weight: Tensor, eps: float, plain: bool, tiled: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    return _outputs(x, addend, plain, tiled)


def _outputs(
    x: Tensor, addend: Tensor | None, plain: bool, tiled: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    if x.ndim != 2 or x.shape[1] % 16 or x.shape[1] == 0:
        want = "expected [R, K] with K a multiple of 16; flatten it, or pad the columns with zeros"
        raise UserError(f"nvfp4_norm_quantize: x is {list(x.shape)}; {want}")
    rows, k = x.shape
    total, normed = (x.new_empty((rows, k) if wanted else 0) for wanted in (addend is not None, plain))
    codes, scales = ops._quantize_outputs(x, rows, k, None, tiled)
    return total, normed, codes, scales, x.new_empty(rows, dtype=torch.float32)
