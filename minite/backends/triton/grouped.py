"""BF16 GEMMs with FP32 accumulation whose epilogue applies the outer scales and rounds once: dense, and by expert.

    out = cast( (acc * alpha) * (a_amax[row] * b_amax[expert]) )        the order of minite.backends.reference

Persistent: one program per multiprocessor takes tiles in turn, the tiles of one expert next to each other, so that its
weight stays in L2; the loops are flattened, so that the loads of a tile overlap the epilogue of the one before. The
expert of a tile is looked up in a table made on the device: the host never waits for rows_E.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from minite.backends.reference import Prepared

_TABLE_ELEMENTS = 4096  # of a program: registers, and compile time, which grows with them


@dataclass(frozen=True)
class Config:
    """Tile sizes and launch parameters of one shape class."""

    m: int
    n: int
    k: int = 64
    stages: int = 4
    warps: int = 8

    @classmethod
    def choose(cls, rows: int, experts: int, n: int, out_dtype: torch.dtype) -> Config:
        """Few rows: a short tile, so that padding costs little. Many: the tile with the fewest bytes per product.

        A single matrix also wants enough tiles for all multiprocessors. The choice changes no bit of the result.
        """
        if rows <= 64 * experts:
            return cls(64, 64, k=128, warps=4) if experts == 1 and n < 2**14 else cls(64, 128, k=128, stages=3, warps=4)
        if out_dtype == torch.float32 or (experts == 1 and rows <= 2048):
            return cls(128, 128)  # float32 results and a wider tile do not fit in shared memory together
        return cls(128, 256)


@triton.jit(do_not_specialize=["limit", "E", "R"])  # they change from call to call: one compilation for all
def _table_kernel(rows_E, table, limit, E, R, EP: tl.constexpr, BM: tl.constexpr, TILE: tl.constexpr):
    """table [4, limit] int32: expert, first row and end row of every row tile; table[3, 0] = how many there are."""
    e = tl.arange(0, EP)
    rows = tl.load(rows_E + e, e < E, other=0).to(tl.int32)
    tiles = (rows + BM - 1) // BM
    row_end, tile_end = tl.cumsum(rows), tl.cumsum(tiles)
    t = tl.program_id(0) * TILE + tl.arange(0, TILE)
    expert = tl.sum((tile_end[None, :] <= t[:, None]).to(tl.int32), 1)
    mine = e[None, :] == expert[:, None]
    end = tl.sum(tl.where(mine, row_end[None, :], 0), 1)
    start = end - tl.sum(tl.where(mine, rows[None, :], 0), 1)
    first_tile = tl.sum(tl.where(mine, (tile_end - tiles)[None, :], 0), 1)
    tl.store(table + t, expert, t < limit)
    tl.store(table + limit + t, start + (t - first_tile) * BM, t < limit)
    tl.store(table + 2 * limit + t, tl.minimum(end, R), t < limit)
    if tl.program_id(0) == 0:
        tl.store(table + 3 * limit, tl.minimum(tl.sum(tiles), limit))


@triton.jit(do_not_specialize=["limit", "R"])
def _gemm_kernel(
    a, b, out, a_amax, b_amax, table, limit, R, N, K, alpha,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    n_tiles = tl.cdiv(N, BN)
    m_tiles = tl.cdiv(R, BM) if table is None else tl.load(table + 3 * limit)
    for tile in tl.range(tl.program_id(0), m_tiles * n_tiles, PROGRAMS, flatten=True):
        m, n = tile // n_tiles, tile % n_tiles
        if table is None:
            expert, row, end = 0, m * BM, R
        else:
            expert = tl.load(table + m)
            row = tl.load(table + limit + m)
            end = tl.load(table + 2 * limit + m)
        acc = tl.zeros((BM, BN), tl.float32)
        for k in range(0, tl.cdiv(K, BK)):
            acc = tl.dot(a.load([row, k * BK]), b.load([expert * N + n * BN, k * BK]).T, acc)
        rows = row + tl.arange(0, BM)
        columns = n * BN + tl.arange(0, BN)
        acc = acc * alpha
        if a_amax is not None:
            outer = tl.load(a_amax + rows, rows < end, other=0)
            if b_amax is not None:
                outer = outer * tl.load(b_amax + expert)
            acc = acc * outer[:, None]
        elif b_amax is not None:
            acc = acc * tl.load(b_amax + expert)
        at = out + rows[:, None].to(tl.int64) * N + columns[None, :]
        tl.store(at, acc.to(out.dtype.element_ty), (rows[:, None] < end) & (columns[None, :] < N))


def tile_table(rows_E: Tensor, rows: int, tile_rows: int) -> tuple[Tensor, int]:
    """(table, its width) for _gemm_kernel; rows_E: integers that sum to rows."""
    experts = rows_E.numel()
    limit = rows // tile_rows + experts
    table = torch.empty(4, limit, dtype=torch.int32, device=rows_E.device)
    padded = triton.next_power_of_2(experts)
    tile = max(1, _TABLE_ELEMENTS // padded)
    _table_kernel[(triton.cdiv(limit, tile),)](rows_E, table, limit, experts, rows, EP=padded, BM=tile_rows, TILE=tile)
    return table, limit


def gemm(
    a: Prepared,
    b: Prepared,
    out_dtype: torch.dtype,
    rows_E: Tensor | None = None,
    config: Config | None = None,
) -> Tensor:
    """[R, N] in out_dtype: rows of a [R, K], sorted by expert, times their expert's weight of b [E, N, K].

    Both bfloat16, contiguous, on 16-byte addresses, K % 8 == 0. Amax of a: [R] or []; of b: [E], or [] if E is 1.
    rows_E: integers [E] on the device that sum to R; that they do is not checked, which would wait for the device.
    None if E is 1.
    """
    (rows, k), (experts, n, _) = a.values.shape, b.values.shape
    device = a.values.device
    out_RN = torch.empty(rows, n, dtype=out_dtype, device=device)
    if not rows:
        return out_RN
    config = config or Config.choose(rows, experts, n, out_dtype)
    table, limit = (None, 0) if rows_E is None else tile_table(rows_E, rows, config.m)
    programs = torch.cuda.get_device_properties(device).multi_processor_count
    a_amax = None if a.amax is None else a.amax.expand(rows).contiguous()
    b_amax = None if b.amax is None else b.amax.contiguous()  # a column of a table of amaxes, say
    _gemm_kernel[(programs,)](
        TensorDescriptor(a.values, [rows, k], [k, 1], [config.m, config.k]),
        TensorDescriptor(b.values, [experts * n, k], [k, 1], [config.n, config.k]),
        out_RN, a_amax, b_amax, table, limit, rows, n, k,
        1 / (a.outer_max * b.outer_max),
        BM=config.m, BN=config.n, BK=config.k, PROGRAMS=programs,
        num_warps=config.warps, num_stages=config.stages, enable_fp_fusion=False,
    )  # fmt: skip
    return out_RN
