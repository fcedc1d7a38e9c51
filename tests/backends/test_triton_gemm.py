"""Products and fused kernels of the Triton backend on a GPU. SUM-ORDER, and BITWISE where no sum is involved."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import GEMM_SHAPES_MNK, normal, seeded
from tolerances import assert_same_bytes, gemm_bound

from minite.backends.reference import ReferenceBackend
from minite.config.operands import OPERANDS
from minite.formats import QTensor, block_scaled, nvfp4, quantize_operand
from minite.layers import ops

pytest.importorskip("triton", reason="the Triton backend needs the package triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

# every pair of row and weight scales that the kernel knows, and pairs that it leaves to torch
PAIRS = [("nvfp4_1d", x) for x in ("nvfp4_row", "nvfp4_tensor", "nvfp4_row_4o6", "bf16", "mxfp8", "fp8_row")]
PAIRS += [(w, "nvfp4_row") for w in ("nvfp4_2d", "nvfp4_1d_4o6", "bf16", "mxfp8", "fp8_tensor", "fp8_128x128")]
PAIRS += [("bf16", "bf16"), ("mxfp8", "mxfp8"), ("fp8_128x128", "fp8_1x128")]
ROWS = ([3, 0, 40, 1, 0], [0, 0, 0, 0, 7], [0, 0, 0, 0, 0], [300, 0, 129, 128, 1], [0, 700, 0, 0, 0])


@pytest.fixture(scope="module")
def backend():
    from minite.backends.registry import get_backend

    chosen = get_backend("auto", device="cuda", strict=False)
    assert chosen.name == "triton"
    return chosen


def scale_rows(x, seed):
    return x * torch.exp2(torch.randint(-6, 7, (*x.shape[:-1], 1), generator=seeded(seed))).bfloat16()


def true_values(operand):
    if not isinstance(operand, QTensor):
        return operand.double()
    values = block_scaled(operand, torch.float64)
    if operand.amax is None:
        return values
    amax = operand.amax.double().reshape(*operand.amax.shape, *[1] * (values.ndim - operand.amax.ndim))
    return values * amax / operand.outer_max


def assert_within_bound(out, a, b, k):
    """a [M, K], b [N, K] float64."""
    exact = a @ b.T
    excess = (out.double() - exact).abs() - gemm_bound(a.abs() @ b.abs().T, exact, k, out.dtype)
    assert out.numel() == 0 or excess.max() <= 0, f"{list(out.shape)}, K {k}: {excess.max():.3g} above the bound"


@pytest.mark.parametrize(("weight", "input"), PAIRS)
def test_gemm_equals_the_product_of_the_true_values(backend, weight, input):
    for m, n, k in (*GEMM_SHAPES_MNK, (129, 384, 768), (300, 1536, 2048)):
        n = -(-n // OPERANDS[weight].rows_multiple) * OPERANDS[weight].rows_multiple
        if k % OPERANDS[weight].k_multiple or k % OPERANDS[input].k_multiple:
            continue
        a = backend.quantize(scale_rows(normal(m, k), m).cuda(), input)
        b = backend.quantize(0.02 * normal(n, k, seed=1).cuda(), weight)
        for out_dtype in (torch.bfloat16, torch.float32):
            out = backend.gemm(a, backend.prepare(b), out_dtype)
            assert out.dtype == out_dtype
            assert_within_bound(out, true_values(a), true_values(b), k)


@pytest.mark.parametrize(("n", "k"), [(128, 128), (1536, 2048), (2048, 768), (384, 256)])
@pytest.mark.parametrize(("weight", "input"), PAIRS)
def test_grouped_gemm_equals_the_product_by_expert(backend, weight, input, n, k):
    w_ENK = 0.02 * normal(5, n, k, seed=3) * torch.tensor([1, 5, 0.1, 1, 30]).bfloat16()[:, None, None]
    b = backend.quantize(w_ENK.cuda(), weight)
    for rows in ROWS:
        a = backend.quantize(scale_rows(normal(sum(rows), k, seed=4), 5).cuda(), input)
        out = backend.grouped_gemm(a, backend.prepare(b), torch.tensor(rows, device="cuda"), torch.bfloat16)
        assert out.shape == (sum(rows), n) and out.dtype == torch.bfloat16
        parts = zip(out.split(rows), true_values(a).split(rows), true_values(b), strict=True)
        for part, a_MK, b_NK in parts:
            assert_within_bound(part, a_MK, b_NK, k)


def test_short_sums_have_the_bits_of_the_reference(backend):
    """K = 16: the float32 sum is exact, so that only the order of the outer scales is left."""
    x, w = scale_rows(normal(200, 16), 6).cuda(), normal(64, 16, seed=7).cuda()
    reference = ReferenceBackend(strict=False)
    a, b = quantize_operand(x, "nvfp4_row"), quantize_operand(w, "nvfp4_1d")
    for out_dtype in (torch.float32, torch.bfloat16):
        wanted = reference.gemm(a, reference.prepare(b), out_dtype)
        assert_same_bytes(backend.gemm(a, backend.prepare(b), out_dtype), wanted)


def test_narrow_experts(backend):
    """N and K below every tile, and N not a multiple of one."""
    for n, k in ((16, 32), (48, 32), (136, 16)):
        b = backend.quantize(normal(5, n, k, seed=3).cuda(), "nvfp4_1d")
        a = backend.quantize(normal(44, k, seed=4).cuda(), "nvfp4_row")
        out = backend.grouped_gemm(a, backend.prepare(b), torch.tensor(ROWS[0], device="cuda"), torch.float32)
        for part, a_MK, b_NK in zip(out.split(ROWS[0]), true_values(a).split(ROWS[0]), true_values(b), strict=True):
            assert_within_bound(part, a_MK, b_NK, k)


def test_scales_that_lie_apart_in_memory(backend):
    """A sampler keeps one amax for each member of a fused weight and passes a column of that table."""
    a = backend.quantize(normal(44, 64, seed=4).cuda(), "nvfp4_row")
    q = backend.quantize((normal(5, 48, 64, seed=3) * torch.arange(1, 6).bfloat16()[:, None, None]).cuda(), "nvfp4_1d")
    rows_E = torch.tensor(ROWS[0], device="cuda")
    wanted = backend.grouped_gemm(a, backend.prepare(q), rows_E, torch.bfloat16)
    column_E = torch.stack([q.amax, 7 * q.amax], dim=1)[:, 0]
    strided_R = torch.stack([a.amax, 3 * a.amax], dim=1)[:, 0]
    a, q = replace(a, amax=strided_R), replace(q, amax=column_E)
    assert_same_bytes(backend.grouped_gemm(a, backend.prepare(q), rows_E, torch.bfloat16), wanted)


def test_gradient_products_of_plain_operands(backend):
    w_ENK, dy = 0.02 * normal(5, 96, 64, seed=3).cuda(), normal(44, 96, seed=4).cuda()
    dx = backend.grouped_gemm(
        dy, backend.prepare(w_ENK.transpose(1, 2)), torch.tensor(ROWS[0], device="cuda"), torch.bfloat16
    )
    for part, dy_e, w_NK in zip(dx.split(ROWS[0]), dy.split(ROWS[0]), w_ENK, strict=True):
        assert_within_bound(part, dy_e.double(), w_NK.double().T, 96)


def test_a_view_at_an_odd_address(backend):
    flat = normal(33 * 64 + 1).cuda()
    x = flat[1:].view(33, 64)
    b = backend.quantize(normal(32, 64, seed=1).cuda(), "nvfp4_1d")
    out = backend.gemm(x, backend.prepare(b), torch.float32)
    assert_within_bound(out, x.double(), true_values(b), 64)


@pytest.mark.parametrize("k", [48, 768, 2048])
def test_swiglu_rounds_as_the_layer_and_quantizes_what_it_rounded(k):
    from minite.backends.triton import fused

    gate_up = scale_rows(normal(333, 2 * k), 8)
    gate_up[:, :4] = torch.tensor(
        [-86, -87.5, -88.5, -200]
    ).bfloat16()  # exp(-gate) near the end of float32 and past it
    out = fused.swiglu(gate_up.cuda(), ("plain", "codes", "values"))
    assert_same_bytes(out.plain, ops.swiglu(gate_up.cuda(), strict=False), "BF16")
    wanted = nvfp4.quantize(out.plain.cpu(), outer="row")
    for name, got, value in (
        ("codes", out.codes, wanted.codes),
        ("scales", out.scales, wanted.block_scale),
        ("amax", out.amax, wanted.amax),
        ("values", out.values, block_scaled(wanted)),
    ):
        assert_same_bytes(got, value, name)


@pytest.mark.parametrize("k", [48, 768, 2048])
def test_rms_norm_quantizes_what_it_rounded(k):
    from minite.backends.triton import fused

    x, weight = scale_rows(normal(333, k), 9).cuda(), normal(k, seed=10).cuda()
    out = fused.rms_norm(x, weight, 1e-6, ("plain", "codes", "values"))
    exact = ops.rms_norm(x.double(), weight.double(), 1e-6, strict=True)
    # half a BF16 unit, and float32 work: K additions of squares (halved by the root) and five more roundings
    bound = exact.abs() * (2.0**-8 + (k / 2 + 5) * 2.0**-24)
    assert ((out.plain.double() - exact).abs() <= bound).all()
    wanted = nvfp4.quantize(out.plain.cpu(), outer="row")
    assert_same_bytes(out.codes, wanted.codes, "codes")
    assert_same_bytes(out.scales, wanted.block_scale, "scales")
    assert_same_bytes(out.amax, wanted.amax, "amax")
    assert_same_bytes(out.values, block_scaled(wanted), "values")


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize("input", ["nvfp4_row", "bf16"])
@pytest.mark.parametrize("tokens", [1, 7, 300])
@pytest.mark.parametrize("experts_used", [3, 16])
def test_experts_equal_the_steps_of_the_layer(backend, tokens, experts_used, input, decode):
    from minite.backends.triton import fused

    top, experts, hidden, inner = 3, 16, 256, 128
    x = scale_rows(normal(tokens, hidden), 11).cuda()
    logits = normal(tokens, experts, dtype=torch.float32, seed=12).cuda()
    logits[:, experts_used:] = -1e9
    prob, expert = ops.route_topk(logits, top)
    weights = [
        backend.quantize(0.05 * normal(experts, n, k, seed=n).cuda(), "nvfp4_1d")
        for n, k in ((2 * inner, hidden), (hidden, inner))
    ]
    prepared = [backend.prepare(w, decode=decode) for w in weights]
    out = backend.fused.experts(x, prob, expert, experts, *prepared, (input, input))
    gate_up, down = (backend.prepare(w) for w in weights)
    x_RH, token_R, rows_E, slot_R = ops.moe_permute(x, expert, experts)
    h = backend.grouped_gemm(backend.quantize(x_RH, input), gate_up, rows_E, torch.bfloat16)
    h = fused.swiglu(h, ("plain",)).plain
    y = backend.grouped_gemm(backend.quantize(h, input), down, rows_E, torch.bfloat16)
    wanted = ops.moe_combine(y, prob.flatten()[slot_R], token_R, tokens, strict=False)
    assert_same_bytes(out, wanted)
    assert_same_bytes(ops.moe_combine(y, prob.flatten()[slot_R], token_R, tokens, False, backend.fused), wanted)


def test_gradients_of_fused_steps_are_those_of_the_steps(backend):
    tokens, top, inner = 50, 3, 64
    gate_up = scale_rows(normal(tokens * top, 2 * inner), 13).cuda()
    prob, expert = ops.route_topk(normal(tokens, 8, dtype=torch.float32, seed=14).cuda(), top)
    _, token_R, _, slot_R = ops.moe_permute(gate_up[:tokens], expert, 8)
    grads = []
    for fused in (None, backend.fused):
        leaves = [gate_up.clone().requires_grad_(), prob.flatten()[slot_R].clone().requires_grad_()]
        h = ops.swiglu(leaves[0], False, fused)
        out = ops.moe_combine(h, leaves[1], token_R, tokens, False, fused)
        grads.append(torch.autograd.grad(out, leaves, normal(tokens, inner, seed=15).cuda()))
    assert_same_bytes(grads[1][0], grads[0][0], "gate_up")
    assert_same_bytes(grads[1][1], grads[0][1], "probabilities")


@pytest.mark.parametrize("rows", ROWS)
def test_weight_gradients_by_expert(backend, rows):
    dy, x = normal(sum(rows), 96, seed=16).cuda(), normal(sum(rows), 64, seed=17).cuda()
    dw = backend.grouped_wgrad(dy, x, torch.tensor(rows, device="cuda"), torch.bfloat16)
    assert dw.shape == (len(rows), 96, 64) and dw.dtype == torch.bfloat16
    for dw_NK, dy_rN, x_rK in zip(dw, dy.split(rows), x.split(rows), strict=True):
        assert_within_bound(dw_NK, dy_rN.double().T, x_rK.double().T, max(len(x_rK), 1))
