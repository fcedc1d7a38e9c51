"""What the operators of minite.backends.cutlass.ops promise, computed with minite.formats on a CPU."""

from __future__ import annotations

import torch
from cases import exact_norm
from torch import Tensor

from minite.backends.cutlass import ops
from minite.formats import QTensor, block_scaled, layout, nvfp4
from minite.layers import moe, pointwise


def quantize(x, amax, offsets, tiled, block_rows, swiglu):
    x = pointwise.swiglu(x, strict=False) if swiglu else x
    rows, k = x.shape
    if amax is None:
        q = nvfp4.quantize(x, (1, 16), "row", nonfinite="te")
    else:  # one amax for each rows / S rows, as the experts of a weight have it
        per_expert = x.view(len(amax), rows // len(amax), k)
        q = nvfp4.quantize(per_expert, (block_rows, 16), "expert", amax=amax)
    scales = q.block_scale.view(torch.uint8).view(rows, k // 16)
    scales = swizzle(scales, offsets) if tiled else scales
    measured = x.float().abs().amax(1) if amax is None else x.new_empty(0, dtype=torch.float32)  # NaN shows
    return q.codes.view(rows, k // 2), scales, measured


def norm_quantize(x, addend, weight, eps, plain, tiled):
    t = x if addend is None else x + addend
    y = exact_norm(t, weight, eps)
    unwanted = x.new_empty(0)
    return (unwanted if addend is None else t, y if plain else unwanted, *quantize(y, None, None, tiled, 1, False))


def permute(codes, scales, amax, source_row, offsets):
    return codes[source_row], swizzle(scales[source_row], offsets), amax[source_row]


def combine(y_RH: Tensor, prob_Tk: Tensor, position_Tk: Tensor) -> Tensor:
    order_R = position_Tk.flatten().long().argsort()
    return moe.moe_combine(y_RH, prob_Tk.flatten()[order_R], order_R // prob_Tk.shape[1], len(prob_Tk), strict=False)


def amax(x: Tensor, slices: int) -> Tensor:
    return x.float().abs().view(slices, -1).amax(1)


def swizzle(scales_RG: Tensor, offsets: Tensor | None) -> Tensor:
    if offsets is None:
        return layout.swizzle(scales_RG)
    size = ops.tile_bytes(*scales_RG.shape, offsets.shape[1] - 1)
    used = layout.swizzle_experts(scales_RG, offsets[0].diff())
    return torch.cat((used, used.new_full((size - used.numel(),), 0x7F)))  # what no row owns is NaN


def gemm(a, a_tiles, row_amax, b, b_tiles, weight_amax, offsets, alpha, out_dtype):
    experts, n, half = b.shape
    m, k = len(a), 2 * half
    ops._check_gemm(a, a_tiles, row_amax, b, b_tiles, weight_amax, offsets, (m, n, k))
    sizes = torch.tensor([m]) if offsets is None else offsets[0].diff()
    used = int(layout.expert_offsets(sizes, k // 16)[-1])
    a_scales = layout.unswizzle_experts(a_tiles[:used], sizes, k // 16).view(torch.float8_e4m3fn)
    b_scales = layout.unswizzle(b_tiles, n, k // 16).view(torch.float8_e4m3fn)
    a_RK = block_scaled(QTensor("nvfp4", a, a_scales, row_amax, (m, k), (1, 16)), torch.float32)
    b_ENK = block_scaled(QTensor("nvfp4", b, b_scales, weight_amax, (experts, n, k), (1, 16)), torch.float32)
    acc = torch.cat([x @ w.T for x, w in zip(a_RK.split(sizes.tolist()), b_ENK, strict=True)])
    outer_R1 = (weight_amax.repeat_interleave(sizes) * row_amax)[:, None]
    return acc.mul_(alpha).mul_(outer_R1).to(out_dtype)


def twin(a, a_tiles, row_amax, b, b_tiles, weight_amax, offsets, alpha, out_dtype):
    """gemm on sm_90: BF16 codes x block scales."""
    (m, k), n = a.shape, b.shape[1]
    ops._check_gemm(a, a_tiles, row_amax, b, b_tiles, weight_amax, offsets, (m, n, k))
    sizes = torch.tensor([m]) if offsets is None else offsets[0].diff()
    acc = torch.cat([x.float() @ w.float().T for x, w in zip(a.split(sizes.tolist()), b, strict=True)])
    return acc.mul_(alpha).mul_((weight_amax.repeat_interleave(sizes) * row_amax)[:, None]).to(out_dtype)


def swizzle_columns(scales_NG: Tensor, starts: Tensor) -> Tensor:
    edges = (starts // 16).tolist()
    used = torch.cat([layout.swizzle(scales_NG[:, a:b]) for a, b in zip(edges, edges[1:], strict=False)])
    height, width = layout.padded_shape(*scales_NG.shape)
    return torch.cat((used, used.new_full((height * width - used.numel(),), 0x7F)))


def wgrad(a, a_tiles, row_amax, b, b_tiles, weight_amax, starts, alpha, out_dtype):
    columns_E = starts.diff().tolist()
    results = []
    for e, columns in enumerate(columns_E):
        values = []
        for codes, tiles in ((a, a_tiles), (b, b_tiles)):
            rows, height = len(codes), layout.padded_shape(len(codes), 4)[0]
            run = tiles[int(starts[e]) * height // 16 : int(starts[e + 1]) * height // 16]
            scales = layout.unswizzle(run, rows, columns // 16).view(torch.float8_e4m3fn)
            part = codes[:, int(starts[e]) // 2 : int(starts[e + 1]) // 2]
            q = QTensor("nvfp4", part, scales, torch.ones(()), (rows, columns), (1, 16))
            values.append(block_scaled(q, torch.float32))
        results.append((values[0] @ values[1].T).mul_(alpha).mul_((weight_amax[e] * row_amax)[:, None]).to(out_dtype))
    return torch.stack(results)


def twin_wgrad(a, a_tiles, row_amax, b, b_tiles, weight_amax, starts, alpha, out_dtype):
    """wgrad on sm_90: BF16 codes x block scales."""
    edges = starts.tolist()
    acc = [a[:, p:q].float() @ b[:, p:q].float().T for p, q in zip(edges, edges[1:], strict=False)]
    return torch.stack(acc).mul_(alpha).mul_(weight_amax[:, None, None] * row_amax[:, None]).to(out_dtype)
