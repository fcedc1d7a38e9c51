"""The gradient of experts' weights in NVFP4: torch.library operators over the grouped GEMM whose groups are columns."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.backends.cutlass import ops
from minite.backends.cutlass.checks import check_sizes, check_tensor
from minite.backends.cutlass.library import GemmCall, for_device
from minite.errors import UserError
from minite.formats import layout

RUN = 64  # columns of an expert are a multiple of this, and at least one


def run_starts(columns_E: Tensor) -> Tensor:
    """Where the columns of each expert begin, and the end: int32 [E + 1], computed where columns_E is."""
    return torch.nn.functional.pad(columns_E.cumsum(0, dtype=torch.int32), (1, 0))


@torch.library.custom_op("minite::nvfp4_swizzle_columns", mutates_args=(), device_types="cuda")
def swizzle_columns(scales_NG: Tensor, starts: Tensor) -> Tensor:
    """Linear scales uint8 [N, G] of codes [N, 16 G] -> flat tiles, those of each run of columns by themselves."""
    rows, columns = scales_NG.shape
    tiles = _run_tiles(scales_NG)
    if columns % 4:
        raise UserError(f"nvfp4_swizzle_columns: {columns} columns of scales; expected a multiple of 4; pad the tokens")
    check_tensor("nvfp4_swizzle_columns: scales", scales_NG, torch.uint8, (rows, columns), scales_NG.device)
    check_tensor("nvfp4_swizzle_columns: starts", starts, torch.int32, tuple(starts.shape), scales_NG.device)
    with torch.cuda.device(scales_NG.device):
        for_device(scales_NG.device).swizzle_columns(
            scales_NG.data_ptr(), rows, columns, starts.data_ptr(), len(starts) - 1, tiles.data_ptr(),
            ops._stream(scales_NG),
        )  # fmt: skip
    return tiles


@swizzle_columns.register_fake
def _(scales_NG: Tensor, starts: Tensor) -> Tensor:
    return _run_tiles(scales_NG)


def _run_tiles(scales_NG: Tensor) -> Tensor:
    """Rows that pad a tile stay unwritten: they spoil only results that are never stored."""
    height, width = layout.padded_shape(*scales_NG.shape)
    return scales_NG.new_empty(height * width, dtype=torch.uint8)


@torch.library.custom_op("minite::nvfp4_wgrad", mutates_args=(), device_types="cuda")
def wgrad(
    a: Tensor,
    a_tiles: Tensor | None,
    row_amax: Tensor,
    b: Tensor,
    b_tiles: Tensor | None,
    weight_amax: Tensor,
    starts: Tensor,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    """[E, M, N] = ((a_e @ b_e.T) * alpha) * (weight_amax * row_amax), e a run of columns, rounded once.

    a: codes uint8 [M, R/2] with tiles of swizzle_columns, b: [N, R/2]; on sm_90a BF16 codes x block scales [M, R] and
    [N, R], without tiles. row_amax float32 [M], weight_amax [E]; starts int32 [E + 1] of run_starts, runs of at least
    64 columns, multiples of 64, together at most R: that is not seen on the host.
    """
    library = for_device(a.device)
    m, n, r = ops._gemm_shapes(a, b[None], library.architecture, a_tiles is not None)
    experts = len(weight_amax)
    _check(a, a_tiles, row_amax, b, b_tiles, starts, (m, n, r, experts))
    out = a.new_empty(experts, m, n, dtype=out_dtype)
    call = GemmCall(
        a=a.data_ptr(),
        a_scales=ops._address(a_tiles),
        b=b.data_ptr(),
        b_scales=ops._address(b_tiles),
        d=out.data_ptr(),
        row_amax=row_amax.data_ptr(),
        weight_amax=weight_amax.data_ptr(),
        starts=starts.data_ptr(),
        stream=ops._stream(a),
        config=ops.choose(m, 1, n, out_dtype),
        m=m,
        n=n,
        k=r,
        groups=experts,
        multiprocessors=torch.cuda.get_device_properties(a.device).multi_processor_count,
        alpha=alpha,
        over_columns=1,
    )
    ops.launch(library, call, a, grouped=True)
    return out


@wgrad.register_fake
def _(
    a: Tensor,
    a_tiles: Tensor | None,
    row_amax: Tensor,
    b: Tensor,
    b_tiles: Tensor | None,
    weight_amax: Tensor,
    starts: Tensor,
    alpha: float,
    out_dtype: torch.dtype,
) -> Tensor:
    return a.new_empty(len(weight_amax), a.shape[0], b.shape[0], dtype=out_dtype)


def _check(
    a: Tensor,
    a_tiles: Tensor | None,
    row_amax: Tensor,
    b: Tensor,
    b_tiles: Tensor | None,
    starts: Tensor,
    sizes: tuple[int, int, int, int],
) -> None:
    (m, n, r, experts), device = sizes, a.device
    check_sizes("nvfp4_wgrad", m, n, r)
    if r % RUN or m == 0 or n == 0:
        raise UserError(
            f"nvfp4_wgrad: [{m}, {r}] by [{n}, {r}]; expected whole runs of {RUN} columns, and rows in both"
        )
    dtype, width = (torch.bfloat16, r) if a_tiles is None else (torch.uint8, r // 2)
    check_tensor("nvfp4_wgrad: a", a, dtype, (m, width), device)
    check_tensor("nvfp4_wgrad: b", b, dtype, (n, width), device)
    check_tensor("nvfp4_wgrad: row_amax", row_amax, torch.float32, (m,), device)
    check_tensor("nvfp4_wgrad: starts", starts, torch.int32, (experts + 1,), device)
    for what, tiles, rows in (("a_tiles", a_tiles, m), ("b_tiles", b_tiles, n)):
        if tiles is not None:
            check_tensor(f"nvfp4_wgrad: {what}", tiles, torch.uint8, (ops.tile_bytes(rows, r // 16, None),), device)
