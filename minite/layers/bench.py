"""What a whole transformer layer costs in emulated W4A4 beside BF16, at the shapes of Qwen3-30B-A3B, on a GPU.

Forward, and forward with the BF16 backward. Both layers have the same norms, RoPE, attention (torch's, in BF16: the
learner's own is FP32 and would hide the GEMMs), permutation and combine. BF16 uses torch's GEMMs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from minite.backends.base import Backend
from minite.backends.triton.backend import TritonBackend
from minite.backends.triton.timing import Run, medians
from minite.layers import ops
from minite.layers.grouped_matmul import quant_grouped_matmul
from minite.layers.matmul import LinearSpec, quant_matmul
from minite.layers.weight_cache import WeightCache

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, INTERMEDIATE, EXPERTS, TOP = 2048, 32, 4, 128, 768, 128, 8
W4A4 = LinearSpec("nvfp4_1d", "nvfp4_row", "bf16", "bf16")
EPS = 1e-6


@dataclass
class Layer:
    """Weights of one layer and how it multiplies; ``spec`` None: torch's BF16 products."""

    weights: dict[str, Tensor]
    backend: Backend
    spec: LinearSpec | None

    def __post_init__(self) -> None:
        self.caches = {name: WeightCache() for name in self.weights}

    def linear(self, x_MK: Tensor, name: str) -> Tensor:
        if self.spec is None:
            return F.linear(x_MK, self.weights[name])
        return quant_matmul(x_MK, self.weights[name], self.spec, self.backend, self.caches[name])

    def experts(self, x_RK: Tensor, name: str, rows_E: Tensor) -> Tensor:
        if self.spec is None:
            ends_E = rows_E.cumsum(0, dtype=torch.int32)
            return F.grouped_mm(x_RK, self.weights[name].transpose(1, 2), offs=ends_E)
        return quant_grouped_matmul(x_RK, self.weights[name], rows_E, self.spec, self.backend, self.caches[name])

    def __call__(self, x_TH: Tensor, length: int) -> Tensor:
        """x [T, H]: T / length sequences."""
        x_TH = x_TH + self._attention(self._norm(x_TH, "norm"), length)
        return x_TH + self._moe(self._norm(x_TH, "norm"))

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return ops.rms_norm(x, self.weights[name], EPS, False, self.backend.fused)

    def _attention(self, h_TH: Tensor, length: int) -> Tensor:
        heads = (HEADS, KV_HEADS, KV_HEADS)
        q, k, v = self.linear(h_TH, "qkv").unflatten(-1, (sum(heads), HEAD_DIM)).split(heads, dim=1)
        position_T = torch.arange(len(h_TH), device=h_TH.device) % length
        cos, sin = ops.rope_cos_sin(position_T, HEAD_DIM, 1e6)
        q, k = (ops.apply_rope(self._norm(t, "head_norm"), cos, sin, False) for t in (q, k))
        q, k, v = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (q, k, v))
        out_SHLD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.linear(out_SHLD.transpose(1, 2).reshape(len(h_TH), -1), "o")

    def _moe(self, h_TH: Tensor) -> Tensor:
        logits_TE = ops.wide_linear(h_TH, self.weights["router"], False, self.backend.fused)
        prob_Tk, expert_Tk = ops.route_topk(logits_TE, TOP)
        slot_R = expert_Tk.flatten().argsort(stable=True)
        token_R = slot_R // TOP
        rows_E = F.one_hot(expert_Tk, EXPERTS).sum((0, 1))  # bincount would wait for the device
        gate_up_R2I = self.experts(h_TH.index_select(0, token_R), "gate_up", rows_E)
        y_RH = self.experts(ops.swiglu(gate_up_R2I, False, self.backend.fused), "down", rows_E)
        prob_R = prob_Tk.flatten()[slot_R]
        return ops.moe_combine(y_RH, prob_R, token_R, len(h_TH), False, self.backend.fused)


def measure(tokens: int = 16384, length: int = 2048) -> list[dict[str, float | str]]:
    """Times of a forward, and of a forward with its backward (all weight gradients), by the two layers."""
    backend, sizes = (
        TritonBackend(strict=False),
        {
            "qkv": ((HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN),
            "o": (HIDDEN, HEADS * HEAD_DIM),
            "router": (EXPERTS, HIDDEN),
            "gate_up": (EXPERTS, 2 * INTERMEDIATE, HIDDEN),
            "down": (EXPERTS, HIDDEN, INTERMEDIATE),
            "norm": (HIDDEN,),
            "head_norm": (HEAD_DIM,),
        },
    )
    weights = {
        name: (torch.randn(shape, device="cuda") * 0.02).bfloat16().requires_grad_() for name, shape in sizes.items()
    }
    x_TH = torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16).requires_grad_()
    dy_TH = torch.randn_like(x_TH)
    layers = {"BF16": Layer(weights, backend, None), "W4A4": Layer(weights, backend, W4A4)}

    def forward(layer: Layer) -> Run:
        def run() -> Tensor:
            with torch.no_grad():
                return layer(x_TH, length)

        return run

    def both(layer: Layer) -> Run:
        return lambda: torch.autograd.grad(layer(x_TH, length), [x_TH, *weights.values()], dy_TH)

    rows: list[dict[str, float | str]] = []
    for what, make in (("forward", forward), ("forward + BF16 backward", both)):
        times = medians({name: make(layer) for name, layer in layers.items()}, repeats=10)
        rows += [
            {"layer": what, "tokens": tokens, "run": name, "ms": ms, "of BF16": ms / times["BF16"]}
            for name, ms in times.items()
        ]
    return rows
