"""The reference backend's GEMMs against explicit formulas. SUM-ORDER, and BITWISE where nothing may differ."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cases import DEVICES, EDGE_INPUTS, GEMM_SHAPES_MNK, normal, seeded
from tolerances import assert_same_bytes, gemm_bound

from minite.backends.reference import ReferenceBackend
from minite.config.operands import OPERANDS
from minite.formats import FormatError, QTensor, block_scaled, quantize_operand
from minite.formats.rounding import round_once

pytestmark = pytest.mark.usefixtures("poisoned_memory")

WEIGHTS = [name for name, operand in OPERANDS.items() if "weight" in operand.roles]
INPUTS = [name for name, operand in OPERANDS.items() if "input" in operand.roles]
PAIRS = [(w, x) for w in WEIGHTS for x in INPUTS]
LOOSE, STRICT = ReferenceBackend(strict=False), ReferenceBackend(strict=True)


def true_values(operand):
    """float64 [rows, K] of an operand, its outer scale (amax / 2688, FP8 / 448) applied in float64."""
    if not isinstance(operand, QTensor):
        return operand.double()
    values = block_scaled(operand, torch.float64)
    if operand.amax is None:
        return values
    amax = operand.amax.double().reshape(*operand.amax.shape, *[1] * (values.ndim - operand.amax.ndim))
    return values * amax / {"nvfp4": 2688, "fp8": 448}[operand.format]


def operands(m, n, k, weight, input, device="cpu", seed=0):
    rows_scale = torch.exp2(torch.randint(-6, 7, (m, 1), generator=seeded(seed))).bfloat16()
    x_MK = (normal(m, k, seed=seed) * rows_scale).to(device)
    w_NK = (0.02 * normal(n, k, seed=seed + 1)).to(device)
    return quantize_operand(x_MK, input), quantize_operand(w_NK, weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("weight", "input"), PAIRS)
def test_gemm_equals_the_product_of_the_true_values(weight, input, strict, device):
    backend = STRICT if strict else LOOSE
    for m, n, k in GEMM_SHAPES_MNK:
        a_MK, b_NK = operands(m, -(-n // 16) * 16 if weight == "nvfp4_2d" else n, k, weight, input, device)
        a, b = true_values(a_MK), true_values(b_NK)
        for out_dtype in (torch.bfloat16, torch.float32) + ((torch.float64,) if strict else ()):
            out_MN = backend.gemm(a_MK, backend.prepare(b_NK), out_dtype)
            assert out_MN.dtype == out_dtype
            exact = a @ b.T
            bound = gemm_bound(a.abs() @ b.abs().T, exact, k, out_dtype)
            if strict:  # float64 sums: only the cast is left, and rounding of float64 itself
                bound = torch.finfo(out_dtype).eps / 2 * exact.abs() + 1e-13 * (a.abs() @ b.abs().T)
            worst = ((out_MN.double() - exact).abs() - bound).max()
            assert worst <= 0, f"{m} x {n} x {k}, {out_dtype}: {worst:.3g} above the bound"


def test_outer_scales_come_last_in_the_row_scaled_order():
    """Block scales and codes are small integers here, so the float32 sum is exact and only the order is left."""
    a_MK, b_NK = operands(64, 64, 16, "nvfp4_1d", "nvfp4_row")
    acc_MN = (block_scaled(a_MK, torch.float64) @ block_scaled(b_NK, torch.float64).T).numpy()
    exact = acc_MN.astype(np.float32) == acc_MN
    assert exact.mean() > 0.9
    alpha = np.float32(1) / np.float32(7225344)
    outer_M1 = a_MK.amax.numpy()[:, None] * b_NK.amax.numpy()
    expected = (acc_MN.astype(np.float32) * alpha) * outer_M1
    out_MN = LOOSE.gemm(a_MK, LOOSE.prepare(b_NK), torch.float32).numpy()
    assert (out_MN[exact] == expected[exact]).all()
    other_order = (acc_MN.astype(np.float32) * (alpha * b_NK.amax.numpy())) * a_MK.amax.numpy()[:, None]
    assert (other_order[exact] != expected[exact]).any(), "these inputs cannot tell the orders apart"


def test_one_nvfp4_operand_has_alpha_of_one():
    for weight, input in (("nvfp4_1d", "bf16"), ("bf16", "nvfp4_row"), ("nvfp4_1d", "mxfp8")):
        a_MK, b_NK = operands(8, 8, 32, weight, input)
        amax = b_NK.amax if weight == "nvfp4_1d" else a_MK.amax[:, None]
        a, b = (block_scaled(o, torch.float32) if isinstance(o, QTensor) else o.float() for o in (a_MK, b_NK))
        expected = (a @ b.T) * np.float32(1 / 2688) * amax
        assert_same_bytes(LOOSE.gemm(a_MK, LOOSE.prepare(b_NK), torch.float32), expected, f"{weight} {input}")


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("weight", "input"), [p for p in PAIRS if p[1] != "nvfp4_tensor"])
def test_strict_rows_are_the_same_alone_and_in_any_batch(weight, input, device):
    for k in (96, 2048):
        # exponents from -14 to 14: a float64 sum of bfloat16 products then rounds, so that its order can show
        a_MK = EDGE_INPUTS["wide_blocks"](71, k, torch.bfloat16).to(device)
        w_NK = EDGE_INPUTS["wide_blocks"](48, k, torch.bfloat16).to(device)
        prepared = STRICT.prepare(quantize_operand(w_NK, weight))
        together = STRICT.gemm(quantize_operand(a_MK, input), prepared, torch.float64)
        order = torch.randperm(71, generator=seeded(2)).to(device)
        for rows in (order[:1], order[1:2], order[:5], order[5:38], order[7:40], order):
            some = STRICT.gemm(quantize_operand(a_MK[rows], input), prepared, torch.float64)
            assert_same_bytes(some, together[rows], f"{len(rows)} rows of K {k}")


def test_strict_nvfp4_sums_are_exact_so_no_order_of_k_changes_them():
    a_MK, b_NK = operands(8, 16, 1024, "nvfp4_1d", "nvfp4_row")
    a, b = block_scaled(a_MK, torch.float64), block_scaled(b_NK, torch.float64)
    order = torch.randperm(1024, generator=seeded(3))
    assert_same_bytes(a[:, order] @ b[:, order].T, a @ b.T)
    scaled = (a @ b.T) * (1 / 7225344) * (a_MK.amax.double() * b_NK.amax.double())[:, None]
    prepared = STRICT.prepare(b_NK)
    assert_same_bytes(STRICT.gemm(a_MK, prepared, torch.float64), scaled)
    assert_same_bytes(STRICT.gemm(a_MK, prepared, torch.bfloat16), round_once(scaled, torch.bfloat16))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(("weight", "input"), PAIRS)
def test_grouped_gemm_is_a_gemm_by_expert(weight, input, strict, device):
    backend = STRICT if strict else LOOSE
    w_ENK = (normal(5, 32, 64) * torch.tensor([1, 5, 0.1, 1, 30]).bfloat16()[:, None, None]).to(device)
    b_ENK = quantize_operand(w_ENK, weight)
    for rows in ([3, 0, 40, 1, 0], [0, 0, 0, 0, 7], [0, 0, 0, 0, 0]):
        x_RK = normal(sum(rows), 64, seed=4).to(device)
        a_RK = quantize_operand(x_RK, input)
        rows_E = torch.tensor(rows, device=device)
        out_RN = backend.grouped_gemm(a_RK, backend.prepare(b_ENK), rows_E, torch.bfloat16)
        assert out_RN.shape == (sum(rows), 32) and out_RN.dtype == torch.bfloat16
        whole_amax = a_RK.amax if input == "nvfp4_tensor" else None  # a slice must keep the scale of all rows
        for e, part in enumerate(out_RN.split(rows)):
            start = sum(rows[:e])
            amax = whole_amax if rows[e] else None
            a_e = quantize_operand(x_RK[start : start + rows[e]], input, amax=amax)
            alone = backend.gemm(a_e, backend.prepare(quantize_operand(w_ENK[e], weight)), torch.bfloat16)
            assert_same_bytes(part, alone, f"expert {e} of rows {rows}")


def test_grouped_gemm_refuses_rows_that_do_not_fit():
    prepared = LOOSE.prepare(normal(2, 8, 16))
    with pytest.raises(FormatError, match="2 experts with 5 rows; expected 2 experts with 4 rows"):
        LOOSE.grouped_gemm(normal(4, 16), prepared, torch.tensor([2, 3]), torch.bfloat16)
    with pytest.raises(FormatError, match="1 experts"):
        LOOSE.grouped_gemm(normal(4, 16), prepared, torch.tensor([4]), torch.bfloat16)


def test_zero_rows_and_zero_amax_give_zero_not_nan():
    prepared = STRICT.prepare(quantize_operand(torch.zeros(8, 32).bfloat16(), "nvfp4_1d"))
    x = normal(3, 32)
    x[1] = 0
    out = STRICT.gemm(quantize_operand(x, "nvfp4_row"), prepared, torch.bfloat16)
    assert (out == 0).all()
    for backend in (LOOSE, STRICT):
        assert backend.gemm(quantize_operand(x[:0], "nvfp4_row"), prepared, torch.float32).shape == (0, 8)


def test_operands_and_prepared_weights_are_not_written_to():
    a_MK, b_NK = operands(4, 16, 32, "nvfp4_1d", "nvfp4_row")
    prepared = LOOSE.prepare(b_NK)
    first = LOOSE.gemm(a_MK, prepared, torch.float32)
    assert_same_bytes(LOOSE.gemm(a_MK, prepared, torch.float32), first)
    x = normal(4, 32).float()
    before = x.clone()
    LOOSE.gemm(x, prepared, torch.float32)
    assert_same_bytes(x, before)


def test_what_the_backend_does_not_do_is_said():
    assert all(LOOSE.unsupported_reason(op, w, x) is None for op in ("gemm", "grouped_gemm") for w, x in PAIRS)
    assert "'fp3'" in LOOSE.unsupported_reason("gemm", "fp3", "bf16")
    assert "'conv'" in LOOSE.unsupported_reason("conv", "bf16", "bf16")
    with pytest.raises(FormatError, match="per row"):
        LOOSE.prepare(quantize_operand(normal(16, 32), "nvfp4_row"))
    with pytest.raises(FormatError, match="float64"):
        LOOSE.gemm(normal(2, 16), LOOSE.prepare(normal(2, 16)), torch.float64)
