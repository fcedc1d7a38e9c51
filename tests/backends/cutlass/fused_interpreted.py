"""Run by test_native_backend.py in a process of its own, under TRITON_INTERPRET=1: native experts on CPU tensors."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parent)]

import ops_on_cpu  # noqa: E402
from cases import normal, seeded  # noqa: E402

from minite.backends.cutlass import expert_rows, ops  # noqa: E402
from minite.backends.cutlass.fused import NativeFused  # noqa: E402
from minite.backends.cutlass.weights import NativeWeight  # noqa: E402
from minite.backends.reference import ReferenceBackend  # noqa: E402
from minite.formats import nvfp4  # noqa: E402
from minite.layers import moe, pointwise  # noqa: E402

ops.quantize, ops.gemm = ops_on_cpu.quantize, ops_on_cpu.gemm
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
