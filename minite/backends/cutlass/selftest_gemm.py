"""Cases of the self-test for the products: forward, and dgrad and wgrad of codes. SUM-ORDER against float64."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.backends.cutlass import ops, wgrad
from minite.backends.cutlass.selftest_rows import COMPARED, DEVICE, Case, part_of, random_rows
from minite.formats import QTensor, block_scaled, layout, nvfp4
from minite.formats.columnwise import quantize_columnwise
from minite.formats.nvfp4 import OUTER_MAX

_ALPHA = 1 / OUTER_MAX**2


def gemm_case(architecture: int, rows_E: tuple[int, ...], n: int, k: int, *, grouped: bool) -> Case:
    """[R, N] = x [R, K] @ w [E, N, K].T by expert; dense: one expert."""
    experts, m = len(rows_E), sum(rows_E)
    a = nvfp4.quantize(random_rows(m, k, seed=1).cpu(), (1, 16), "row")
    b = nvfp4.quantize(random_rows(experts * n, k, seed=2).cpu().view(experts, n, k), (1, 16), "expert")
    return _product("gemm grouped" if grouped else "gemm dense", architecture, a, b, rows_E if grouped else None)


def dgrad_case(architecture: int, rows_E: tuple[int, ...], n: int, k: int) -> Case:
    """[R, K] = dy [R, N] @ w [E, N, K] by expert: dy stochastic by rows, the weight columnwise."""
    experts, generator = len(rows_E), torch.Generator().manual_seed(3)
    dy_RN = random_rows(sum(rows_E), n, seed=4).cpu()
    dy = nvfp4.quantize(dy_RN, (1, 16), "row", rounding="stochastic", generator=generator)
    w_ENK = random_rows(experts * n, k, seed=5).cpu().view(experts, n, k)
    return _product("gemm dgrad", architecture, dy, quantize_columnwise(w_ENK, outer="expert"), rows_E)


def wgrad_case(architecture: int, rows_E: tuple[int, ...], n: int, k: int) -> Case:
    """[E, N, K] = dy [R, N].T @ x [R, K] by expert, both columnwise; tokens are padded to runs of 64 zeros or more.

    Behind the last run lie 64 tokens that belong to nobody. An expert without rows has to get zeros, exactly.
    """
    columns_E = [max(1, -(-rows // wgrad.RUN)) * wgrad.RUN for rows in rows_E]
    dy, x = (_columnwise(_padded(rows_E, columns_E, width, seed), outer) for width, seed, outer in
             ((n, 6, "row"), (k, 7, "tensor")))  # fmt: skip
    starts = wgrad.run_starts(torch.tensor(columns_E, device=DEVICE))
    operands = _columnwise_operands(architecture, dy.to(DEVICE), x.to(DEVICE), starts, len(rows_E))

    def run() -> Tensor:
        out: Tensor = wgrad.wgrad(*operands, starts, _ALPHA, torch.bfloat16)
        return out

    def check() -> str | None:
        got, (dy_NR, x_KR) = run()[:, :COMPARED].double().cpu(), (q.dequantize(torch.float64) for q in (dy, x))
        edges = starts.tolist()
        for e, columns in enumerate(columns_E):
            part = slice(edges[e], edges[e + 1])
            fault = _excess(got[e], dy_NR[:COMPARED, part], x_KR[:, part], columns)
            if fault is not None:
                return f"expert {e}: {fault}"
        return None

    total, width = sum(columns_E), 2 if architecture < 100 else 0.5625
    least = width * total * (n + k) + 2 * len(rows_E) * n * k
    return Case("gemm wgrad", _problem(rows_E, n, k), check, run, least, 2.0 * total * n * k)


def _product(kernel: str, architecture: int, a: QTensor, b: QTensor, rows_E: tuple[int, ...] | None) -> Case:
    """a [R, S] by b [E, C, S]; rows_E None: dense."""
    (m, s), c = a.shape, b.shape[1]
    sizes = (m,) if rows_E is None else rows_E
    offsets = None if rows_E is None else ops.expert_offsets(torch.tensor(rows_E, device=DEVICE))
    operands = _operands(architecture, a.to(DEVICE), b.to(DEVICE), offsets)

    def run() -> Tensor:
        out: Tensor = ops.gemm(*operands, offsets, _ALPHA, torch.bfloat16)
        return out

    def check() -> str | None:
        got, first = run().double().cpu(), 0
        for e, rows in enumerate(sizes):
            part = slice(first, first + min(rows, COMPARED))
            first += rows
            a_MS, b_CS = part_of(a, part).dequantize(torch.float64), part_of(b, e).dequantize(torch.float64)
            fault = _excess(got[part], a_MS, b_CS, s) if rows else None
            if fault is not None:
                return f"expert {e}: {fault}"
        return None

    width = 2 if architecture < 100 else 0.5625
    used = sum(1 for rows in sizes if rows)
    least = width * s * (m + used * c) + 2 * m * c
    problem = _problem(sizes, s, c) if kernel == "gemm dgrad" else _problem(sizes, c, s)
    return Case(kernel, problem, check, run, least, 2.0 * m * c * s)


def _excess(got_MC: Tensor, a_MS: Tensor, b_CS: Tensor, terms: int) -> str | None:
    """As backends.doctor: FP32 sums of exact products in any order, and half a unit of the BF16 result."""
    exact, magnitude = a_MS @ b_CS.T, a_MS.abs() @ b_CS.abs().T
    sums = (terms + 8) * 2.0**-24 * magnitude
    bound = sums + 2.0**-8 * (exact.abs() + sums)
    worst = float(((got_MC - exact).abs() - bound).nan_to_num(nan=torch.inf).max())
    return f"{worst:.3g} above the bound" if worst > 0 else None


def _problem(rows_E: tuple[int, ...], n: int, k: int) -> str:
    return f"{'+'.join(map(str, rows_E))} x {n} x {k}"


def _padded(rows_E: tuple[int, ...], columns_E: list[int], width: int, seed: int) -> Tensor:
    """[tokens, width] on the CPU: the rows of each expert and the zeros behind them, then 64 rows of nobody."""
    parts: list[Tensor] = []
    for e, (rows, columns) in enumerate(zip(rows_E, columns_E, strict=True)):
        x_RW = random_rows(rows, width, seed=seed + 10 * e).cpu()
        parts.append(torch.nn.functional.pad(x_RW, (0, 0, 0, columns - rows)))
    return torch.cat([*parts, random_rows(wgrad.RUN, width, seed=seed).cpu()])


def _columnwise(x_RW: Tensor, outer: str) -> QTensor:
    """Codes [W, R]: by row and stochastic as dy has them, or one outer scale and to nearest, as x."""
    if outer == "tensor":
        return quantize_columnwise(x_RW)
    return quantize_columnwise(x_RW, outer="row", rounding="stochastic", generator=torch.Generator().manual_seed(8))


def _operands(architecture: int, a: QTensor, b: QTensor, offsets: Tensor | None) -> tuple[Tensor | None, ...]:
    """The first six arguments of ops.gemm for this chip."""
    assert a.block_scale is not None and b.block_scale is not None and a.amax is not None and b.amax is not None
    if architecture < 100:
        return block_scaled(a), None, a.amax, block_scaled(b), None, b.amax
    a_tiles = ops.swizzle(a.block_scale.view(torch.uint8), offsets)
    return a.codes, a_tiles, a.amax, b.codes, layout.swizzle(b.block_scale.view(torch.uint8)), b.amax


def _columnwise_operands(
    architecture: int, dy: QTensor, x: QTensor, starts: Tensor, experts: int
) -> tuple[Tensor | None, ...]:
    """The first six arguments of wgrad.wgrad for this chip."""
    assert dy.block_scale is not None and x.block_scale is not None and dy.amax is not None and x.amax is not None
    x_amax = x.amax.expand(experts).contiguous()
    if architecture < 100:
        return block_scaled(dy), None, dy.amax, block_scaled(x), None, x_amax
    tiles = [
        wgrad.swizzle_columns(q.block_scale.view(torch.uint8), starts) for q in (dy, x) if q.block_scale is not None
    ]
    return dy.codes, tiles[0], dy.amax, x.codes, tiles[1], x_amax
