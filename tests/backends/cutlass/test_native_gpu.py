"""The kernels of the native backend on a GPU against minite.formats and float64. BITWISE, and SUM-ORDER for products.

Runs on sm_90 (the twin multiplies BF16 codes x block scales), sm_100 and sm_103, each with its own library.
"""

from __future__ import annotations

import pytest
import torch
from cases import EDGE_INPUTS, normal, seeded
from tolerances import assert_same_bytes, gemm_bound
from torch import Tensor

from minite.backends.cutlass import expert_rows, ops
from minite.formats import QTensor, block_scaled, layout, nvfp4
from minite.formats.nvfp4 import OUTER_MAX
from minite.layers import moe
from minite.layers.pointwise import swiglu

pytestmark = pytest.mark.gpu

INPUTS = {"normal": lambda m, k, dtype: normal(m, k, seed=10, dtype=dtype), **EDGE_INPUTS}
# one block; a lane with one, two, four blocks, some idle; more than a warp keeps; padded scale columns
SHAPES_MK = [(8, 64), (33, 80), (16, 768), (130, 2048), (5, 1040), (3, 2064), (2, 8192)]
ROWS = ([3, 0, 40, 1, 0], [0, 0, 0, 0, 7], [300, 0, 129, 128, 1], [0, 700, 0, 0, 0])


@pytest.fixture(autouse=True)
def poisoned_memory(architecture):
    """Memory that kernels get from the allocator holds NaN (as BF16, float32 and E4M3), not zeros."""
    torch.cuda.empty_cache()
    for size in (2**28, 2**20):
        torch.full((size,), 0xFF, dtype=torch.uint8, device="cuda")
    yield


def assert_quantized(got: tuple[Tensor, Tensor], expected: QTensor) -> None:
    codes, scales = got
    assert_same_bytes(scales, expected.block_scale.view(torch.uint8).flatten(0, -2), "scales")
    assert_same_bytes(codes, expected.codes.flatten(0, -2), "codes")


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("shape_MK", SHAPES_MK, ids=str)
def test_row_scaled(make, shape_MK):
    x_MK = make(*shape_MK, torch.bfloat16)
    codes, scales, amax = ops.quantize(x_MK.cuda(), None, None, False, 1, False)
    expected = nvfp4.quantize(x_MK, (1, 16), "row")
    assert_same_bytes(amax, expected.amax, "amax")
    assert_quantized((codes, scales), expected)


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("block", [(1, 16), (16, 16)], ids=["1d", "2d"])
@pytest.mark.parametrize("shape_MK", [(16, 64), (48, 80), (160, 2064)], ids=str)
def test_weights(make, block, shape_MK):
    w_MK = make(*shape_MK, torch.bfloat16)
    expected = nvfp4.quantize(w_MK, block, "tensor")
    amax = ops.amax(w_MK.cuda(), 1)
    assert_same_bytes(amax, expected.amax.view(1), "amax")
    assert_quantized(ops.quantize(w_MK.cuda(), amax, None, False, block[0], False)[:2], expected)


@pytest.mark.parametrize("block", [(1, 16), (16, 16)], ids=["1d", "2d"])
def test_weights_of_experts(block):
    w_ENK = normal(5, 48, 96, seed=30) * torch.exp2(torch.arange(-4.0, 6, 2)).bfloat16()[:, None, None]
    expected = nvfp4.quantize(w_ENK, block, "expert")
    amax = ops.amax(w_ENK.cuda(), 5)
    assert_same_bytes(amax, expected.amax, "amax")
    assert_quantized(ops.quantize(w_ENK.cuda().flatten(0, 1), amax, None, False, block[0], False)[:2], expected)


def test_every_bf16_value():
    values = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = values[values.isfinite()]
    x_MK = torch.cat((x, x[torch.randperm(x.numel(), generator=seeded(2))])).view(-1, 256)
    assert_quantized(ops.quantize(x_MK.cuda(), None, None, False, 1, False)[:2], nvfp4.quantize(x_MK, (1, 16), "row"))


@pytest.mark.parametrize("k", [64, 80, 2064])
@pytest.mark.parametrize("rows_E", ROWS, ids=str)
def test_scales_of_experts_go_to_tiles_of_their_own(rows_E, k):
    sizes = torch.tensor(rows_E)
    x_RK = normal(sum(rows_E), k, seed=31)
    expected = nvfp4.quantize(x_RK, (1, 16), "row")
    linear = expected.block_scale.view(torch.uint8)
    offsets = ops.expert_offsets(sizes.cuda())
    end = int(layout.expert_offsets(sizes, k // 16)[-1])
    for tiles in (
        ops.quantize(x_RK.cuda(), None, offsets, True, 1, False)[1],
        ops.swizzle(linear.cuda(), offsets),
    ):
        assert_same_bytes(layout.unswizzle_experts(tiles[:end].cpu(), sizes, k // 16), linear)
        assert_padding_is_zero(tiles[:end].cpu(), sizes, k // 16)
    tiles = ops.quantize(x_RK.cuda(), None, None, True, 1, False)[1]
    assert_same_bytes(layout.unswizzle(tiles.cpu(), sum(rows_E), k // 16), linear)


def assert_padding_is_zero(tiles: Tensor, sizes: Tensor, columns: int) -> None:
    """In the rows that exist; the GEMM multiplies by it."""
    width = layout.padded_shape(1, columns)[1]
    whole = layout.unswizzle_experts(tiles, sizes, width)
    assert int(whole[:, columns:].sum()) == 0


def test_amaxes_given():
    x_MK = normal(133, 96, seed=32)
    larger = nvfp4.quantize(x_MK, (1, 16), "row").amax * 3
    expected = nvfp4.quantize(x_MK, (1, 16), "row", amax=larger)
    assert_quantized(ops.quantize(x_MK.cuda(), larger.cuda(), None, False, 1, False)[:2], expected)


@pytest.mark.parametrize("k", [32, 96, 2048, 2080])
@pytest.mark.parametrize("rows_E", ROWS, ids=str)
def test_tokens_that_were_quantized_once_go_to_their_experts(rows_E, k):
    total = sum(rows_E)
    x_TK, token_R = normal(40, k, seed=32), torch.randint(40, (total,), generator=seeded(33))
    offsets = ops.expert_offsets(torch.tensor(rows_E).cuda())
    once = ops.quantize(x_TK.cuda(), None, None, False, 1, False)
    codes, tiles, amax = expert_rows.permute(*once, token_R.cuda(), offsets)
    expected = ops.quantize(x_TK[token_R].cuda(), None, offsets, True, 1, False)
    end = int(layout.expert_offsets(torch.tensor(rows_E), k // 16)[-1])
    whole = layout.unswizzle_experts(tiles[:end].cpu(), torch.tensor(rows_E), layout.padded_shape(1, k // 16)[1])
    wanted = layout.unswizzle_experts(expected[1][:end].cpu(), torch.tensor(rows_E), whole.shape[1])
    assert_same_bytes(codes, expected[0], "codes")
    assert_same_bytes(whole, wanted, "scales, zeros behind them too")
    assert_same_bytes(amax, expected[2], "amax")


@pytest.mark.parametrize(("width", "top"), [(8, 1), (264, 3), (2048, 8), (1032, 32)])
def test_combine_is_the_layers(width, top):
    tokens, experts = 67, 32
    expert_Tk = torch.rand(tokens, experts, generator=seeded(36)).topk(top).indices
    prob_Tk = torch.rand(tokens, top, generator=seeded(37))
    _, token_R, _, slot_R = moe.moe_permute(torch.zeros(tokens, 1), expert_Tk, experts)
    y_RH = normal(tokens * top, width, seed=38)
    position_Tk = slot_R.argsort().to(torch.int32).view(tokens, top)
    expected = moe.moe_combine(y_RH, prob_Tk.flatten()[slot_R], token_R, tokens, strict=False)
    got = expert_rows.combine(y_RH.cuda(), prob_Tk.cuda(), position_Tk.cuda())
    assert_same_bytes(got.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("k", [16, 768, 4112])
def test_swiglu_then_quantize(k):
    gate_up = (normal(67, 2 * k, seed=34).float() * 4).bfloat16().cuda()
    h_RK = swiglu(gate_up, strict=False)
    expected = nvfp4.quantize(h_RK.cpu(), (1, 16), "row")
    codes, scales, amax = ops.quantize(gate_up, None, None, False, 1, True)
    assert_same_bytes(amax, expected.amax, "amax")
    assert_quantized((codes, scales), expected)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan], ids=str)
def test_infinity_and_nan_show_in_the_amax(bad):
    x_MK = normal(3, 64, seed=35)
    x_MK[1, 20] = bad
    amax = ops.quantize(x_MK.cuda(), None, None, False, 1, False)[2]
    assert amax.isfinite().tolist() == [True, False, True]
    assert ops.amax(x_MK.cuda(), 3).isfinite().tolist() == [True, False, True]


def operands(architecture: int, a: QTensor, b: QTensor, rows_E: Tensor | None) -> tuple[Tensor | None, ...]:
    """The first six arguments of ops.gemm for the chip at hand."""
    experts = 1 if rows_E is None else len(rows_E)
    n, k = b.shape[-2:]
    amaxes = a.amax.expand(a.shape[0]).contiguous().cuda(), b.amax.reshape(-1).expand(experts).contiguous().cuda()
    if architecture < 100:
        b_ENK = block_scaled(b).view(experts, n, k).cuda()
        return block_scaled(a).cuda(), None, amaxes[0], b_ENK, None, amaxes[1]
    offsets = None if rows_E is None else ops.expert_offsets(rows_E.cuda())
    a_tiles = ops.swizzle(a.block_scale.view(torch.uint8).cuda(), offsets)
    b_tiles = layout.swizzle(b.block_scale.view(torch.uint8).view(experts, n, k // 16)).cuda()
    return a.codes.cuda(), a_tiles, amaxes[0], b.codes.view(experts, n, k // 2).cuda(), b_tiles, amaxes[1]


def outer(q: QTensor) -> Tensor:
    return q.amax.double().reshape(*q.amax.shape, *[1] * (len(q.shape) - q.amax.ndim)) / OUTER_MAX


def assert_within_bound(out: Tensor, a: QTensor, b: QTensor, rows_E: list[int]) -> None:
    a_RK = block_scaled(a, torch.float64) * outer(a)
    b_ENK = (block_scaled(b, torch.float64) * outer(b)).view(len(rows_E), *b.shape[-2:])
    parts = [(x @ w.T, x.abs() @ w.abs().T) for x, w in zip(a_RK.split(rows_E), b_ENK, strict=True)]
    exact, magnitude = (torch.cat(p) for p in zip(*parts, strict=True))
    excess = (out.double().cpu() - exact).abs() - gemm_bound(magnitude, exact, a.shape[1], out.dtype)
    assert out.isfinite().all() and float(excess.max()) <= 0, f"{float(excess.max())} above the bound"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(
    "mnk", [(1, 8, 32), (3, 24, 96), (127, 136, 160), (128, 128, 768), (257, 520, 2080), (600, 1000, 1536)], ids=str
)
def test_dense(architecture, mnk, dtype):
    m, n, k = mnk
    a = nvfp4.quantize(
        normal(m, k, seed=40) * torch.exp2(torch.arange(m) % 9 - 4.0).bfloat16()[:, None], (1, 16), "row"
    )
    b = nvfp4.quantize(normal(n, k, seed=41), (1, 16), "tensor")
    out = ops.gemm(*operands(architecture, a, b, None), None, 1 / OUTER_MAX**2, dtype)
    assert out.dtype == dtype and out.shape == (m, n)
    assert_within_bound(out, a, b, [m])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("nk", [(8, 32), (136, 96), (512, 2080)], ids=str)
@pytest.mark.parametrize("rows_E", [*ROWS, [1000, 600, 900, 0, 1200]], ids=str)
def test_grouped(architecture, rows_E, nk, dtype):
    n, k = nk
    sizes = torch.tensor(rows_E)
    a = nvfp4.quantize(normal(sum(rows_E), k, seed=42), (1, 16), "row")
    b = nvfp4.quantize(normal(len(rows_E), n, k, seed=43), (1, 16), "expert")
    first_six = operands(architecture, a, b, sizes)
    out = ops.gemm(*first_six, ops.expert_offsets(sizes.cuda()), 1 / OUTER_MAX**2, dtype)
    assert_within_bound(out, a, b, rows_E)


def test_exact_sums_give_the_bits_of_the_reference(architecture):
    """K = 32: sums of 32 products are exact in float32, so only the order of the outer scales is left to differ."""
    a, b = nvfp4.quantize(normal(300, 32, seed=44), (1, 16), "row"), nvfp4.quantize(normal(64, 32, seed=45))
    out = ops.gemm(*operands(architecture, a, b, None), None, 1 / OUTER_MAX**2, torch.float32)
    acc = (block_scaled(a, torch.float64) @ block_scaled(b, torch.float64).T).float()
    assert_same_bytes(out, acc.mul_(1 / OUTER_MAX**2).mul_((a.amax * b.amax).unsqueeze(-1)))


def test_a_graph_replays_with_other_sizes(architecture):
    """Sizes by expert are read on the device: one capture serves every routing of as many rows."""
    experts, n, k, rows = 4, 128, 64, 300
    b = nvfp4.quantize(normal(experts, n, k, seed=46), (1, 16), "expert")
    x_RK = normal(rows, k, seed=47).cuda()
    rows_E = torch.tensor([100, 100, 50, 50], device="cuda")
    weight = operands(architecture, nvfp4.quantize(x_RK.cpu(), (1, 16), "row"), b, rows_E.cpu())[3:]

    def run() -> Tensor:
        offsets = ops.expert_offsets(rows_E)
        codes, tiles, amax = ops.quantize(x_RK, None, offsets, True, 1, False)
        if architecture < 100:
            scales = ops.quantize(x_RK, None, None, False, 1, False)[1].view(torch.float8_e4m3fn)
            q = QTensor("nvfp4", codes, scales, amax, (rows, k), (1, 16))
            return ops.gemm(block_scaled(q), None, amax, *weight, offsets, 1 / OUTER_MAX**2, torch.bfloat16)
        return ops.gemm(codes, tiles, amax, *weight, offsets, 1 / OUTER_MAX**2, torch.bfloat16)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for seed, sizes in enumerate(([100, 100, 50, 50], [300, 0, 0, 0], [0, 1, 128, 171])):
        x_RK.copy_(normal(rows, k, seed=50 + seed))
        rows_E.copy_(torch.tensor(sizes))
        graph.replay()
        assert_within_bound(out, nvfp4.quantize(x_RK.cpu(), (1, 16), "row"), b, sizes)


def test_operators_keep_the_rules_of_torch(architecture):
    x_MK, offsets = normal(48, 64, seed=60).cuda(), ops.expert_offsets(torch.tensor([40, 8]).cuda())
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.quantize, (x_MK, None, offsets, True, 1, False), test_utils=checks)
    torch.library.opcheck(ops.quantize, (x_MK, ops.amax(x_MK, 1), None, False, 16, False), test_utils=checks)
    torch.library.opcheck(ops.amax, (x_MK, 3), test_utils=checks)
    a, b = nvfp4.quantize(x_MK.cpu(), (1, 16), "row"), nvfp4.quantize(normal(2, 8, 64, seed=61), (1, 16), "expert")
    first_six = operands(architecture, a, b, torch.tensor([40, 8]))
    torch.library.opcheck(ops.gemm, (*first_six, offsets, 1.0, torch.bfloat16), test_utils=checks)


@pytest.mark.slow
def test_a_million_rows():
    rows, k = 2**20, 2048  # 2^31 elements: offsets do not fit int32
    x_MK = torch.randn(rows, k, dtype=torch.bfloat16, device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    codes, tiles, amax = ops.quantize(x_MK, None, None, True, 1, False)
    for first in (0, 2**19, rows - 128):
        part = slice(first, first + 128)
        expected = nvfp4.quantize(x_MK[part].cpu(), (1, 16), "row")
        size = 128 * k // 16
        scales = layout.unswizzle(tiles[first // 128 * size :][:size].cpu(), 128, k // 16)
        assert_same_bytes(amax[part], expected.amax)
        assert_quantized((codes[part], scales), expected)
