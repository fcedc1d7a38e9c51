"""Run by test_native_backend.py in a process of its own, under TRITON_INTERPRET=1: native experts on CPU tensors."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import ops_on_cpu  # noqa: E402
from cases import exact_norm, normal, seeded  # noqa: E402

from minite.backends.cutlass import expert_rows, norm, ops  # noqa: E402
from minite.backends.cutlass.backend import NativeBackend  # noqa: E402
from minite.backends.cutlass.fused import NativeFused  # noqa: E402
from minite.backends.cutlass.weights import NativeWeight  # noqa: E402
from minite.backends.reference import ReferenceBackend  # noqa: E402
from minite.formats import nvfp4  # noqa: E402
from minite.layers import moe, pointwise  # noqa: E402

ops.quantize, ops.gemm = ops_on_cpu.quantize, ops_on_cpu.gemm
norm.norm_quantize, ops.swizzle = ops_on_cpu.norm_quantize, ops_on_cpu.swizzle
expert_rows.permute, expert_rows.combine = ops_on_cpu.permute, ops_on_cpu.combine
tokens, hidden, wide, experts, top = 21, 64, 32, 5, 2
reference = ReferenceBackend(strict=False)
gate_up = nvfp4.quantize(normal(experts, 2 * wide, hidden, seed=70), (1, 16), "expert")
down = nvfp4.quantize(normal(experts, hidden, wide, seed=71), (1, 16), "expert")
x_TH, logits_TE = normal(tokens, hidden, seed=72), torch.randn(tokens, experts, generator=seeded(73))
logits_TE[:, 3] = -torch.inf  # an expert without rows
prob_Tk, expert_Tk = logits_TE.softmax(-1).topk(top)
got = NativeFused(reference).experts(
    x_TH, prob_Tk, expert_Tk, experts,
    NativeWeight.of(gate_up, reference), NativeWeight.of(down, reference), ("nvfp4_row", "nvfp4_row"),
)  # fmt: skip
x_RH, token_R, rows_E, slot_R = moe.moe_permute(x_TH, expert_Tk, experts)
h_R2I = reference.grouped_gemm(nvfp4.quantize(x_RH, outer="row"), reference.prepare(gate_up), rows_E, torch.bfloat16)
h_RI = nvfp4.quantize(pointwise.swiglu(h_R2I, strict=False), outer="row")
y_RH = reference.grouped_gemm(h_RI, reference.prepare(down), rows_E, torch.bfloat16)
expected = moe.moe_combine(y_RH, prob_Tk.flatten()[slot_R], token_R, tokens, strict=False)
assert torch.equal(got, expected), (got.float() - expected.float()).abs().max()

# norm and codes in one kernel: for experts, which take the codes as they are, and for a dense weight, in tiles
backend = NativeBackend.__new__(NativeBackend)
backend.strict, backend._emulation, fused = False, reference, NativeFused(reference)
dense, experts_weight = (NativeWeight.of(w, reference) for w in (nvfp4.quantize(normal(48, hidden, seed=74)), gate_up))
residual, weight = normal(tokens, hidden, seed=75), normal(hidden, seed=76)
for y_TH in (None, residual):
    t_TH = x_TH if y_TH is None else x_TH + y_TH
    h_TH = exact_norm(t_TH, weight, 1e-6)
    total, kept, codes = fused.norm_quantize(x_TH, y_TH, weight, 1e-6, "nvfp4_row", experts_weight, True)
    assert torch.equal(total, t_TH) and torch.equal(kept, h_TH) and codes.bytes_equal(nvfp4.quantize(h_TH, outer="row"))
    operands = (prob_Tk, expert_Tk, experts, experts_weight, NativeWeight.of(down, reference), ("nvfp4_row",) * 2)
    given = fused.experts(torch.full_like(h_TH, torch.nan), *operands, codes)  # the codes are what is read
    assert torch.equal(given, fused.experts(h_TH, *operands))
    total, kept, codes = fused.norm_quantize(x_TH, y_TH, weight, 1e-6, "nvfp4_row", dense, False)
    assert torch.equal(total, t_TH) and kept is None and codes.layout == "swizzled"
    steps = backend.gemm(nvfp4.quantize(h_TH, outer="row"), dense, torch.bfloat16)
    assert torch.equal(backend.gemm(codes, dense, torch.bfloat16), steps)
for how, reader, x in (("nvfp4_tensor", dense, x_TH), ("nvfp4_row", None, x_TH), ("nvfp4_row", dense, x_TH.float())):
    assert fused.norm_quantize(x, None, weight, 1e-6, how, reader, True) is None
