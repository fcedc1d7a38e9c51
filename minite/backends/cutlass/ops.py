"""torch.library operators over the libraries: what a graph capture, torch.compile and the backend call.

No operator waits for the device. Sizes by expert come as ``offsets`` int32 [2, E + 1]: where the rows of each expert
begin, and where its block scales do, in rows of which every expert has a multiple of 128.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite.backends.cutlass.checks import check_sizes, check_tensor
from minite.backends.cutlass.library import GemmCall, Library, QuantizeCall, ScalesCall, for_device
from minite.errors import UserError
from minite.formats import layout

_TILE_ROWS = 128
_NARROW, _WIDE, _FLOAT32 = 0, 1, 2  # the order of dispatch_* in csrc
_WIDE_FROM = 256  # rows an expert, on average, and columns: the wide tile is 256 x 256 (128 x 256 on sm_90a)


def expert_offsets(rows_E: Tensor) -> Tensor:
    """``offsets`` of integer rows_E, computed where rows_E is."""
    rows_E = rows_E.to(torch.int32)
    both_2E = torch.stack((rows_E, (rows_E + (_TILE_ROWS - 1)) // _TILE_ROWS * _TILE_ROWS))
    return torch.nn.functional.pad(both_2E.cumsum(1, dtype=torch.int32), (1, 0))


def tile_bytes(rows: int, columns: int, experts: int | None) -> int:
    """Size of a buffer of swizzled scales: for experts the most that any split of the rows can need."""
    if experts is not None:  # ceil(r / 128), summed over the experts that have rows, is at most this
        rows = (rows + (_TILE_ROWS - 1) * min(experts, rows)) // _TILE_ROWS * _TILE_ROWS
    height, width = layout.padded_shape(rows, columns)
    return height * width


def choose(rows: int, experts: int, n: int, out_dtype: torch.dtype) -> int:
    """Which tiles to use. A guess from the shapes: no Blackwell GPU was measured."""
    if out_dtype == torch.float32:
        return _FLOAT32
    return _WIDE if rows >= _WIDE_FROM * experts and n >= _WIDE_FROM else _NARROW


@torch.library.custom_op("minite::nvfp4_quantize", mutates_args=(), device_types="cuda")
def quantize(
    x: Tensor,
    amax: Tensor | None,
    offsets: Tensor | None,
    tiled: bool,
    block_rows: int,
    swiglu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """(codes uint8 [R, K/2], scales uint8 [R, K/16] or, ``tiled``, swizzled and flat, amax float32 [R]).

    x: BF16 [R, K], or [R, 2K] with ``swiglu``: then BF16(silu(x[:, :K]) * x[:, K:]) is quantized. amax: float32
    [S], S divides R: one for each R / S rows; None: one by row, measured and returned (else what is returned is empty).
    block_rows: 1, or 16 for 16x16 blocks, which need amax.
    """
    rows, k, amax_out = _quantize_shapes(x, amax, block_rows, swiglu)
    codes, scales = _quantize_outputs(x, rows, k, offsets, tiled)
    if rows == 0:
        return codes, scales, amax_out
    if amax is not None:
        check_tensor("nvfp4_quantize: amax", amax, torch.float32, (amax.numel(),), x.device)
    check_tensor("nvfp4_quantize: x", x, torch.bfloat16, tuple(x.shape), x.device)
    measured = amax is None
    call = QuantizeCall(
        x=x.data_ptr(),
        amax_in=_address(amax),
        amax_out=amax_out.data_ptr() if measured else None,
        codes=codes.data_ptr(),
        scales=_scales(scales, tiled, offsets),
        stream=_stream(x),
        rows=rows,
        rows_per_amax=1 if amax is None else rows // amax.numel(),
        k=k,
        block_rows=block_rows,
        swiglu=int(swiglu),
    )
    with torch.cuda.device(x.device):
        for_device(x.device).quantize(call)
    return codes, scales, amax_out


@quantize.register_fake
def _(
    x: Tensor,
    amax: Tensor | None,
    offsets: Tensor | None,
    tiled: bool,
    block_rows: int,
    swiglu: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    rows, k, amax_out = _quantize_shapes(x, amax, block_rows, swiglu)
    return *_quantize_outputs(x, rows, k, offsets, tiled), amax_out


@torch.library.custom_op("minite::nvfp4_swizzle", mutates_args=(), device_types="cuda")
def swizzle(scales_RG: Tensor, offsets: Tensor | None) -> Tensor:
    """Linear scales uint8 [R, G] -> swizzled, flat: formats.layout.swizzle, or swizzle_experts with ``offsets``."""
    rows, columns = scales_RG.shape
    tiles = _tiles(scales_RG, rows, columns, offsets)
    if rows == 0:
        return tiles
    check_tensor("nvfp4_swizzle: scales", scales_RG, torch.uint8, (rows, columns), scales_RG.device)
    with torch.cuda.device(scales_RG.device):
        library, stream = for_device(scales_RG.device), _stream(scales_RG)
        library.swizzle(scales_RG.data_ptr(), rows, columns, _scales(tiles, True, offsets), stream)
    return tiles


@swizzle.register_fake
def _(scales_RG: Tensor, offsets: Tensor | None) -> Tensor:
    return _tiles(scales_RG, scales_RG.shape[0], scales_RG.shape[1], offsets)


@torch.library.custom_op("minite::nvfp4_amax", mutates_args=(), device_types="cuda")
def amax(x: Tensor, slices: int) -> Tensor:
    """max |x| of each of ``slices`` equal parts of BF16 x: float32 [slices]; NaN where there is one."""
    out = x.new_empty(slices, dtype=torch.float32)
    check_tensor("nvfp4_amax: x", x, torch.bfloat16, tuple(x.shape), x.device)
    with torch.cuda.device(x.device):
        for_device(x.device).amax(x.data_ptr(), slices, x.numel() // max(slices, 1), out.data_ptr(), _stream(x))
    return out


@amax.register_fake
def _(x: Tensor, slices: int) -> Tensor:
    return x.new_empty(slices, dtype=torch.float32)


@torch.library.custom_op("minite::nvfp4_gemm", mutates_args=(), device_types="cuda")
def gemm(
    a: Tensor,
    a_tiles: Tensor | None,
    row_amax: Tensor,
    b: Tensor,
    b_tiles: Tensor | None,
    weight_amax: Tensor,
    offsets: Tensor | None,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """[M, N] = ((a @ b.T) * alpha) * (weight_amax * row_amax), rounded once to bfloat16 or float32.

    a: codes uint8 [M, K/2] with a_tiles, b: [E, N, K/2] with b_tiles (each expert padded by itself); on sm_90a BF16
    codes x block scales [M, K] and [E, N, K], without tiles. row_amax float32 [M], weight_amax [E]. offsets: grouped,
    rows sorted by expert; None: dense, E = 1.
    """
    library = for_device(a.device)
    m, n, k = _gemm_shapes(a, b, library.architecture, a_tiles is not None)
    experts = b.shape[0]
    out = a.new_empty(m, n, dtype=out_dtype)
    if m == 0 or n == 0:
        return out
    _check_gemm(a, a_tiles, row_amax, b, b_tiles, weight_amax, offsets, (m, n, k))
    call = GemmCall(
        a=a.data_ptr(),
        a_scales=_address(a_tiles),
        b=b.data_ptr(),
        b_scales=_address(b_tiles),
        d=out.data_ptr(),
        row_amax=row_amax.data_ptr(),
        weight_amax=weight_amax.data_ptr(),
        starts=None if offsets is None else offsets[0].data_ptr(),
        scale_starts=None if offsets is None else offsets[1].data_ptr(),
        stream=_stream(a),
        config=choose(m, experts, n, out_dtype),
        m=m,
        n=n,
        k=k,
        groups=experts,
        multiprocessors=torch.cuda.get_device_properties(a.device).multi_processor_count,
        alpha=alpha,
    )
    launch(library, call, a, grouped=offsets is not None)
    return out


def launch(library: Library, call: GemmCall, a: Tensor, *, grouped: bool) -> None:
    """Enqueue a product on the device of its operand a, with the workspace that it asks for."""
    workspace = a.new_empty(library.workspace(call, grouped=grouped), dtype=torch.uint8)
    call.workspace, call.workspace_bytes = workspace.data_ptr(), workspace.numel()
    with torch.cuda.device(a.device):
        library.gemm(call, grouped=grouped)


@gemm.register_fake
def _(
    a: Tensor,
    a_tiles: Tensor | None,
    row_amax: Tensor,
    b: Tensor,
    b_tiles: Tensor | None,
    weight_amax: Tensor,
    offsets: Tensor | None,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


def _gemm_shapes(a: Tensor, b: Tensor, architecture: int, tiles: bool) -> tuple[int, int, int]:
    if tiles != (architecture >= 100):
        form = "packed codes with swizzled scales" if architecture >= 100 else "BF16 codes x block scales"
        raise UserError(f"nvfp4_gemm: a GPU of sm_{architecture} multiplies {form}; got the other form")
    per_element = 2 if tiles else 1
    return a.shape[0], b.shape[1], a.shape[1] * per_element


def _check_gemm(
    a: Tensor,
    a_tiles: Tensor | None,
    row_amax: Tensor,
    b: Tensor,
    b_tiles: Tensor | None,
    weight_amax: Tensor,
    offsets: Tensor | None,
    mnk: tuple[int, int, int],
) -> None:
    """Everything that must hold before a launch; see checks.py."""
    (m, n, k), experts, device = mnk, b.shape[0], a.device
    check_sizes("nvfp4_gemm", m, n, k)
    dtype = torch.bfloat16 if a_tiles is None else torch.uint8
    width = k if a_tiles is None else k // 2
    check_tensor("nvfp4_gemm: a", a, dtype, (m, width), device)
    check_tensor("nvfp4_gemm: b", b, dtype, (experts, n, width), device)
    check_tensor("nvfp4_gemm: weight_amax", weight_amax, torch.float32, (experts,), device)
    check_tensor("nvfp4_gemm: row_amax", row_amax, torch.float32, (m,), device)
    if offsets is None:
        if experts != 1:
            raise UserError(f"nvfp4_gemm: {experts} weights without offsets; expected one; pass expert_offsets(rows_E)")
    elif offsets.dtype != torch.int32 or tuple(offsets.shape) != (2, experts + 1) or offsets.device != device:
        got = f"{offsets.dtype} {list(offsets.shape)} on {offsets.device}"
        want = f"int32 [2, {experts + 1}] on {device}"
        raise UserError(f"nvfp4_gemm: offsets are {got}; expected {want}; use expert_offsets")
    if a_tiles is not None and b_tiles is not None:
        size = tile_bytes(m, k // 16, None if offsets is None else experts)
        check_tensor("nvfp4_gemm: a_tiles", a_tiles, torch.uint8, (size,), device)
        check_tensor("nvfp4_gemm: b_tiles", b_tiles, torch.uint8, (experts, tile_bytes(n, k // 16, None)), device)


def _quantize_shapes(x: Tensor, amax: Tensor | None, block_rows: int, swiglu: bool) -> tuple[int, int, Tensor]:
    """(rows, K, the amax tensor to return); UserError for sizes that the quantizer does not take."""
    if x.ndim != 2:
        raise UserError(f"nvfp4_quantize: x is {list(x.shape)}; expected [R, K]; flatten it")
    k = x.shape[1] // 2 if swiglu else x.shape[1]
    if k % 16 or (swiglu and x.shape[1] % 2):
        raise UserError(f"nvfp4_quantize: K is {k}; expected a multiple of 16; pad the columns with zeros")
    rows = x.shape[0]
    squares = block_rows == 16 and amax is not None and rows % 16 == 0 and not swiglu
    if block_rows != 1 and not squares:
        want = "1, or 16 with amax and rows % 16 == 0"
        raise UserError(f"nvfp4_quantize: blocks of {block_rows} rows, {rows} rows; expected {want}")
    if amax is None:
        return rows, k, x.new_empty(rows, dtype=torch.float32)
    if amax.ndim != 1 or (rows and (amax.shape[0] == 0 or rows % amax.shape[0])):
        raise UserError(f"nvfp4_quantize: amax is {list(amax.shape)}; expected [S] where S divides the {rows} rows")
    return rows, k, amax.new_empty(0)


def _quantize_outputs(x: Tensor, rows: int, k: int, offsets: Tensor | None, tiled: bool) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(rows, k // 2, dtype=torch.uint8)
    return codes, _tiles(codes, rows, k // 16, offsets) if tiled else codes.new_empty(rows, k // 16)


def _tiles(like: Tensor, rows: int, columns: int, offsets: Tensor | None) -> Tensor:
    """Rows that pad a tile stay unwritten: they spoil only results that are never stored."""
    experts = None if offsets is None else offsets.shape[1] - 1
    return like.new_empty(tile_bytes(rows, columns, experts), dtype=torch.uint8)


def _scales(scales: Tensor, tiled: bool, offsets: Tensor | None) -> ScalesCall:
    return ScalesCall(
        linear=None if tiled else scales.data_ptr(),
        tiles=scales.data_ptr() if tiled else None,
        starts=None if offsets is None else offsets[0].data_ptr(),
        scale_starts=None if offsets is None else offsets[1].data_ptr(),
        experts=0 if offsets is None else offsets.shape[1] - 1,
    )


def _address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()


def _stream(x: Tensor) -> int:
    return torch.cuda.current_stream(x.device).cuda_stream
