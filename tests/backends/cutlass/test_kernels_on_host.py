"""The CUDA quantizers run on a CPU, lane by lane, against minite.formats: indices, tails, tiles, experts. BITWISE.

Slow (32 threads stand for a warp), so shapes are small; every shape that takes another path is there.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import ops_on_cpu
import pytest
import torch
from cases import normal, seeded
from tolerances import assert_same_bytes
from torch import Tensor

from minite.backends.cutlass import ops, wgrad
from minite.backends.cutlass.build import CSRC
from minite.backends.cutlass.library import CombineCall, NormCall, PermuteCall, QuantizeCall
from minite.formats import layout, nvfp4
from minite.layers.moe import moe_combine, moe_permute

ROWS = ([3, 0, 2], [0, 0, 5], [130, 0, 1])


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ on the path")
    library = tmp_path_factory.mktemp("kernels") / "libkernels_on_host.so"
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-pthread", "-shared", "-fPIC", f"-I{CSRC}"]
    source = Path(__file__).with_name("kernels_on_host.cpp")
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def quantize(
    host: ctypes.CDLL,
    x: Tensor,
    held: int,
    *,
    amax: Tensor | None = None,
    offsets: Tensor | None = None,
    tiled: bool = False,
    swiglu: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """As ops.quantize, over poisoned outputs."""
    k = x.shape[1] // (2 if swiglu else 1)
    rows = len(x)
    codes = torch.full((rows, k // 2), 0xA5, dtype=torch.uint8)
    experts = None if offsets is None else offsets.shape[1] - 1
    size = (ops.tile_bytes(rows, k // 16, experts),) if tiled else (rows, k // 16)
    scales = torch.full(size, 0x7F, dtype=torch.uint8)
    measured = torch.full((rows,), torch.nan)
    call = QuantizeCall(
        x=x.data_ptr(),
        amax_in=ops._address(amax),
        amax_out=measured.data_ptr(),
        codes=codes.data_ptr(),
        scales=ops._scales(scales, tiled, offsets),
        rows=rows,
        rows_per_amax=1 if amax is None else rows // len(amax),
        k=k,
        block_rows=16 if held == 16 else 1,
        swiglu=swiglu,
    )
    host.quantize(ctypes.byref(call), held)
    return codes, scales, measured


# held: as minite_quantize chooses it for this K; 0 for rows that a warp cannot keep
@pytest.mark.parametrize(
    ("k", "held"), [(16, 1), (80, 1), (512, 1), (528, 2), (1024, 2), (1040, 4), (2048, 4), (2064, 0)]
)
def test_rows_of_every_length(host, k, held):
    x_MK = normal(9, k, seed=90) * torch.exp2(torch.arange(9) - 4.0).bfloat16()[:, None]
    expected = nvfp4.quantize(x_MK, (1, 16), "row")
    codes, scales, amax = quantize(host, x_MK, held)
    assert_same_bytes(amax, expected.amax, "amax")
    assert_same_bytes(scales, expected.block_scale.view(torch.uint8), "scales")
    assert_same_bytes(codes, expected.codes, "codes")


@pytest.mark.parametrize("shape_MK", [(16, 16), (48, 80), (32, 272)], ids=str)
def test_squares_and_one_amax_for_many_rows(host, shape_MK):
    w_MK = normal(*shape_MK, seed=91)
    experts = 2 if shape_MK[0] % 32 == 0 else 1
    for block, held in (((16, 16), 16), ((1, 16), 1)):
        expected = nvfp4.quantize(w_MK.view(experts, -1, shape_MK[1]), block, "expert")
        codes, scales, measured = quantize(host, w_MK, held, amax=expected.amax)
        assert_same_bytes(scales, expected.block_scale.view(torch.uint8).flatten(0, 1), "scales")
        assert_same_bytes(codes, expected.codes.flatten(0, 1), "codes")
        assert bool(measured.isnan().all()), "an amax that was given is not written"


@pytest.mark.parametrize("k", [48, 64, 80])
@pytest.mark.parametrize("rows_E", ROWS, ids=str)
def test_scales_go_to_the_tiles_of_their_expert(host, rows_E, k):
    sizes = torch.tensor(rows_E)
    x_RK = normal(sum(rows_E), k, seed=92)
    linear = nvfp4.quantize(x_RK, (1, 16), "row").block_scale.view(torch.uint8)
    offsets = ops.expert_offsets(sizes)
    written = quantize(host, x_RK, 1, offsets=offsets, tiled=True)[1]
    moved = torch.full_like(written, 0x7F)
    scales = ops._scales(moved, True, offsets)
    host.swizzle_scales(ctypes.c_void_p(linear.data_ptr()), ctypes.c_int64(len(x_RK)), k // 16, ctypes.byref(scales))
    end, width = int(layout.expert_offsets(sizes, k // 16)[-1]), layout.padded_shape(1, k // 16)[1]
    for tiles in (written, moved):
        whole = layout.unswizzle_experts(tiles[:end], sizes, width)
        assert_same_bytes(whole[:, : k // 16].contiguous(), linear)
        assert int(whole[:, k // 16 :].sum()) == 0, "columns that pad are zero"
        assert bool((tiles[end:] == 0x7F).all()), "nothing is written behind the last expert"
    assert_same_bytes(written, moved)


@pytest.mark.parametrize("columns_E", [[64], [64, 192, 64, 128]], ids=str)
@pytest.mark.parametrize("n", [16, 136])
def test_scales_of_runs_of_columns_go_to_tiles_of_their_own(host, n, columns_E):
    """What CUTLASS reads for expert e: the layout of an [n, columns] matrix. The last 64 columns belong to nobody."""
    total = sum(columns_E) + 64
    scales_NG = torch.randint(0, 0x7F, (n, total // 16), generator=seeded(102), dtype=torch.uint8)
    starts = wgrad.run_starts(torch.tensor(columns_E))
    height, width = layout.padded_shape(n, total // 16)
    tiles = torch.full((height * width,), 0x7F, dtype=torch.uint8)
    linear, first, out = (ctypes.c_void_p(t.data_ptr()) for t in (scales_NG, starts, tiles))
    host.swizzle_runs(linear, ctypes.c_int64(n), total // 16, first, len(columns_E), out)
    for e, columns in enumerate(columns_E):
        begin, end = (int(starts[i]) * height // 16 for i in (e, e + 1))
        part = layout.unswizzle(tiles[begin:end], n, columns // 16)
        assert_same_bytes(part, scales_NG[:, starts[e] // 16 : starts[e + 1] // 16].contiguous())
    assert bool((tiles[end:] == 0x7F).all()), "nothing is written behind the last run"


def test_one_matrix_in_tiles(host):
    x_MK = normal(131, 80, seed=93)
    tiles = quantize(host, x_MK, 1, tiled=True)[1]
    expected = nvfp4.quantize(x_MK, (1, 16), "row").block_scale.view(torch.uint8)
    assert_same_bytes(layout.unswizzle(tiles, 131, 5), expected)


def norm_quantize(
    host: ctypes.CDLL, x: Tensor, addend: Tensor | None, weight: Tensor, held: int, *, plain: bool, tiled: bool = False
) -> tuple[Tensor, ...]:
    """As norm.norm_quantize with eps 1e-6, over poisoned outputs; what is not asked for stays poisoned."""
    rows, k = x.shape
    total, normed = (torch.full_like(x, torch.nan) for _ in range(2))
    codes, amax = torch.full((rows, k // 2), 0xA5, dtype=torch.uint8), torch.full((rows,), torch.nan)
    size = (ops.tile_bytes(rows, k // 16, None),) if tiled else (rows, k // 16)
    scales = torch.full(size, 0x7F, dtype=torch.uint8)
    call = NormCall(
        x=x.data_ptr(), addend=ops._address(addend), weight=weight.data_ptr(), total=total.data_ptr(),
        plain=normed.data_ptr() if plain else None, amax_out=amax.data_ptr(), codes=codes.data_ptr(),
        scales=ops._scales(scales, tiled, None), rows=rows, k=k, eps=1e-6,
    )  # fmt: skip
    host.norm(ctypes.byref(call), held)
    return total, normed, codes, scales, amax


def scaled_rows(rows: int, k: int, seed: int) -> Tensor:
    """Rows of different sizes; within a row float32 sums of squares depend on their order."""
    size = torch.exp2(torch.randint(-6, 7, (rows, 1), generator=seeded(seed))).bfloat16()
    return normal(rows, k, seed=seed) * size


# held: as minite_norm_quantize chooses it for this K
@pytest.mark.parametrize(("k", "held"), [(16, 2), (528, 2), (1024, 2), (1040, 4), (2048, 4), (2064, 0), (4128, 0)])
@pytest.mark.parametrize("summed", [False, True])
def test_norm_then_codes_of_rows_of_every_length(host, summed, k, held):
    x, weight = scaled_rows(9, k, 103), normal(k, seed=105)
    addend = scaled_rows(9, k, 104) if summed else None
    expected = ops_on_cpu.norm_quantize(x, addend, weight, 1e-6, True, False)
    for plain in (True, False):
        total, normed, codes, scales, amax = norm_quantize(host, x, addend, weight, held, plain=plain)
        assert_same_bytes(amax, expected[4], "amax")
        assert_same_bytes(scales, expected[3], "scales")
        assert_same_bytes(codes, expected[2], "codes")
        written = ((total, summed, expected[0], "sum"), (normed, plain, expected[1], "norm"))
        for got, wanted, value, name in written:
            if wanted:
                assert_same_bytes(got.view(torch.int16), value.view(torch.int16), name)
            else:
                assert bool(got.isnan().all()), f"{name} is written unasked"


@pytest.mark.parametrize(("k", "held"), [(48, 2), (2064, 0)])
def test_norm_of_rows_at_the_ends_of_the_range(host, k, held):
    """Zeros, squares that leave float32, subnormals, one column alone; NaN and infinity show in their own row only."""
    x, weight = normal(8, k, seed=106), normal(k, seed=107)
    x[0], x[1], x[2], x[3, 1:] = 0, x[1] * 2.0**100, x[2] * 2.0**-130, 0
    weight[: k // 2] *= 2.0**90
    x[4, 7], x[5, 20] = torch.nan, torch.inf
    expected = ops_on_cpu.norm_quantize(x, None, weight, 1e-6, True, False)
    got = norm_quantize(host, x, None, weight, held, plain=True)
    assert got[4].isfinite().tolist() == [True] * 4 + [False] * 2 + [True] * 2
    finite = [0, 1, 2, 3, 6, 7]
    for mine, value, name in zip(got[1:], expected[1:], ("norm", "codes", "scales", "amax"), strict=True):
        assert_same_bytes(mine[finite].view(torch.uint8), value[finite].view(torch.uint8), name)


@pytest.mark.parametrize("k", [64, 80])
def test_scales_behind_a_norm_go_to_tiles(host, k):
    x, weight = scaled_rows(131, k, 108), normal(k, seed=109)
    linear = ops_on_cpu.norm_quantize(x, None, weight, 1e-6, False, False)[3]
    tiles = norm_quantize(host, x, None, weight, 2, plain=False, tiled=True)[3]
    whole = layout.unswizzle(tiles, 131, layout.padded_shape(1, k // 16)[1])
    assert_same_bytes(whole[:, : k // 16].contiguous(), linear)
    assert int(whole[:, k // 16 :].sum()) == 0, "columns that pad are zero"


@pytest.mark.parametrize("k", [48, 96, 544])
def test_tokens_that_were_quantized_once_go_to_their_experts(host, k):
    sizes, token_R = torch.tensor([3, 0, 130, 8]), torch.randint(6, (141,), generator=seeded(95))
    x_TK, offsets = normal(6, k, seed=94), ops.expert_offsets(sizes)
    once, expected = (nvfp4.quantize(x, (1, 16), "row") for x in (x_TK, x_TK[token_R]))
    scales = once.block_scale.view(torch.uint8)
    codes, amax = torch.full((141, k // 2), 0xA5, dtype=torch.uint8), torch.full((141,), torch.nan)
    tiles = torch.full((ops.tile_bytes(141, k // 16, 4),), 0x7F, dtype=torch.uint8)
    call = PermuteCall(
        codes_in=once.codes.data_ptr(), scales_in=scales.data_ptr(), amax_in=once.amax.data_ptr(),
        source_row=token_R.data_ptr(), amax_out=amax.data_ptr(), codes=codes.data_ptr(),
        scales=ops._scales(tiles, True, offsets), rows=141, k=k,
    )  # fmt: skip
    host.permute(ctypes.byref(call))
    assert_same_bytes(amax, expected.amax)
    assert_same_bytes(codes, expected.codes)
    assert_same_bytes(tiles, quantize(host, x_TK[token_R].contiguous(), 2, offsets=offsets, tiled=True)[1])


@pytest.mark.parametrize(("width", "top"), [(8, 1), (264, 3), (512, 8), (1032, 32)])
def test_combine_in_ascending_order_of_experts(host, width, top):
    """Choices are in the order of the router, positions in any; sums of float32 tell one order from another."""
    tokens, experts = 5, 32
    expert_Tk = torch.rand(tokens, experts, generator=seeded(99)).topk(top).indices
    prob_Tk = torch.rand(tokens, top, generator=seeded(100))
    _, token_R, _, slot_R = moe_permute(torch.zeros(tokens, 1), expert_Tk, experts)
    position_Tk = slot_R.argsort().to(torch.int32).view(tokens, top)
    y_RH = normal(tokens * top, width, seed=101) * torch.exp2(torch.arange(tokens * top) % 9 - 4.0).bfloat16()[:, None]
    out = torch.full((tokens, width), torch.nan, dtype=torch.bfloat16)
    call = CombineCall(
        y=y_RH.data_ptr(), prob=prob_Tk.data_ptr(), position=position_Tk.data_ptr(), out=out.data_ptr(),
        tokens=tokens, width=width, top=top,
    )  # fmt: skip
    host.combine(ctypes.byref(call))
    expected = moe_combine(y_RH, prob_Tk.flatten()[slot_R], token_R, tokens, strict=False)
    assert_same_bytes(out.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize(("k", "held"), [(32, 1), (2064, 0)])
def test_swiglu_of_the_right_columns(host, k, held):
    """Values whose SiLU is exact in any implementation: gate 0 gives 0, a gate above 40 gives itself."""
    gate = (torch.randint(0, 2, (5, k), generator=seeded(96)) * 64).bfloat16()
    up = normal(5, k, seed=97)
    expected = nvfp4.quantize((gate.float() * up.float()).bfloat16(), (1, 16), "row")
    codes, scales, amax = quantize(host, torch.cat((gate, up), 1).contiguous(), held, swiglu=True)
    assert_same_bytes(amax, expected.amax)
    assert_same_bytes(scales, expected.block_scale.view(torch.uint8))
    assert_same_bytes(codes, expected.codes)


def test_amax_by_slice(host):
    x = normal(3, 37 * 16, seed=98)
    x[1, 100], x[2, 5] = torch.nan, -torch.inf
    out = torch.zeros(3)
    host.amax_of(ctypes.c_void_p(x.data_ptr()), 3, ctypes.c_int64(37 * 16), ctypes.c_void_p(out.data_ptr()))
    assert float(out[0]) == float(x[0].abs().max()) and out.isfinite().tolist() == [True, False, False]
