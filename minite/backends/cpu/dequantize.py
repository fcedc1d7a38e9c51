"""Reading NVFP4: codes x block scales for GEMMs, and values. Byte for byte what formats.nvfp4 gives."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from minite.backends.cpu.bits import F32, U32, U64, e2m1_value, put_pair, spread
from minite.backends.cpu.compiled import inlined, kernel
from minite.formats.qtensor import QTensor

_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32).numpy()  # value of each byte


def block_scaled(q: QTensor, dtype: torch.dtype) -> Tensor:
    """codes x block scales [*shape], exact in bfloat16 and wider, without the outer scale."""
    return _read(q, dtype, None, 1.0)


def dequantize(q: QTensor, dtype: torch.dtype) -> Tensor:
    """Values [*shape]: code * ((block scale * amax) * fl(1 / outer_max)) in float32, then cast to dtype."""
    return _read(q, dtype, q.amax, 1 / q.outer_max)


def _read(q: QTensor, dtype: torch.dtype, amax: Tensor | None, outer: float) -> Tensor:
    assert q.block_scale is not None and q.layout == "linear"
    out = torch.empty(q.shape, dtype=torch.bfloat16 if dtype == torch.bfloat16 else torch.float32)
    pairs = out.view(torch.uint32 if out.dtype == torch.bfloat16 else torch.uint64)
    amax_O = np.ones(1, F32) if amax is None else amax.reshape(-1).numpy()
    codes, scale = (t.contiguous().flatten(0, -2).numpy() for t in (q.codes, q.block_scale.view(torch.uint8)))
    decode(codes, scale, _E4M3, amax_O, F32(outer), pairs.flatten(0, -2).numpy())
    return out.to(dtype)


@kernel
def decode(codes_RB, scale_RG, e4m3, amax_O, outer, out_RB):  # type: ignore[no-untyped-def]
    """Values into out [rows, K/2]: pairs of float32 as uint64, or of BF16 as uint32."""
    rows, g = scale_RG.shape
    each = max(1, rows // max(1, amax_O.shape[0]))
    factor_G, factor_B = np.empty(g, F32), np.empty(4 * g, U64)
    for row in range(rows):
        amax = F32(amax_O[row // each])
        for i in range(g):
            factor_G[i] = F32(e4m3[scale_RG[row, i]] * amax) * outer
        spread(factor_G, factor_B)
        _values(codes_RB[row], factor_B.view(F32), out_RB[row])


@inlined
def _values(codes_B, factor_B, out_B):  # type: ignore[no-untyped-def]
    for j in range(codes_B.shape[0]):
        byte = U32(codes_B[j])
        put_pair(out_B, j, e2m1_value(byte) * factor_B[j], e2m1_value(U32(byte >> U32(4))) * factor_B[j])
