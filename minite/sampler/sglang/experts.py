"""The experts of one MoE layer, by the numerics of layers/moe.py, with nothing that a CUDA graph could not record."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.backends.base import Backend
from minite.layers import ops
from minite.layers.matmul import AmaxReduction, quantize_reduced
from minite.sampler.embedded.weights import Linear
from minite.sampler.sglang.watching import Watch


def forward(
    backend: Backend,
    gate_up: Linear,
    down: Linear,
    x_TH: Tensor,
    logits_TE: Tensor,
    expert_Tk: Tensor,
    reduce_amax: AmaxReduction | None = None,
    watch: Watch | None = None,
) -> Tensor:
    """sum over a token's experts of probability * expert(x). -> [T, H], the dtype of x.

    logits_TE float32, expert_Tk integers: the experts that were chosen. Equal to ops.moe_permute, the two GEMMs
    and ops.moe_combine, bit for bit: a token's experts are added in ascending order. Host-side sizes are those of the
    inputs only, as a graph needs it. ``reduce_amax``: over the ranks that hold parts of down's input; the result is
    then this rank's part of the sum.
    """
    tokens, k = expert_Tk.shape
    num_experts = logits_TE.shape[1]
    expert_Tk = expert_Tk.long().clamp(min=0)  # SGLang marks the padding of a graph's batch by -1; nobody reads it
    prob_Tk = logits_TE.gather(-1, expert_Tk).softmax(dim=-1)  # in the order recorded, which the learner replays
    if backend.fused is not None and reduce_amax is None:  # which measures the amax of down's input itself
        weights, inputs = (gate_up.prepared, down.prepared), (gate_up.input_operand, down.input_operand)
        fused_TH = backend.fused.experts(x_TH, prob_Tk, expert_Tk, num_experts, *weights, inputs)
        if fused_TH is not None:
            return fused_TH
    expert_Tk, order_Tk = expert_Tk.sort(dim=-1)
    prob_Tk = prob_Tk.gather(-1, order_Tk)
    if watch is not None:
        watch.op("route_topk", (prob_Tk, expert_Tk), logits_TE)
    slot_R = expert_Tk.flatten().argsort(stable=True)  # row -> (token, choice), sorted by expert
    rows_E = (expert_Tk.flatten()[:, None] == torch.arange(num_experts, device=x_TH.device)).sum(0)
    h_RK = _gemm(backend, gate_up, x_TH[slot_R // k], rows_E)
    act_RK = ops.swiglu(h_RK, strict=False)
    if watch is not None:
        watch.op("swiglu", act_RK, h_RK)
    y_RH = _gemm(backend, down, act_RK, rows_E, reduce_amax)
    y_TkH = torch.empty_like(y_RH).index_copy_(0, slot_R, y_RH).view(tokens, k, -1)
    out_TH = torch.zeros(tokens, y_RH.shape[1], dtype=torch.float32, device=x_TH.device)
    for choice in range(k):
        out_TH = out_TH + y_TkH[:, choice].float() * prob_Tk[:, choice, None].float()
    if watch is not None:
        watch.op("moe_combine", out_TH.to(x_TH.dtype), y_RH, prob_Tk.flatten()[slot_R])
    return out_TH.to(x_TH.dtype)


def _gemm(
    backend: Backend, linear: Linear, x_RK: Tensor, rows_E: Tensor, reduce_amax: AmaxReduction | None = None
) -> Tensor:
    a_RK = quantize_reduced(x_RK, linear.input_operand, backend, reduce_amax, linear.entry.name, kept=False)
    return backend.grouped_gemm(a_RK, linear.prepared, rows_E, x_RK.dtype)
