"""A backend that norms and quantizes in one kernel: the model asks it before each GEMM behind a norm, and uses both."""

from __future__ import annotations

import pytest
import torch
from tiny_engine import DENSE, LLAMA, MOE, config, engine, requests

from minite.layers import ops


class OneKernel:
    """Fused stretches that do nothing but norm_quantize, in the arithmetic of the steps."""

    def __init__(self, model, takes=("nvfp4_row",)):
        self.model, self.takes, self.asked, self.given = model, takes, [], []

    def norm_quantize(self, x_TH, y_TH, w_H, eps, how, reader, keep):
        linear = next(linear for linear in self.model.weights.linears if linear.prepared is reader)
        self.asked.append((linear.entry.name, keep))
        if how not in self.takes:
            return None
        x_TH = x_TH if y_TH is None else x_TH + y_TH
        h_TH = ops.rms_norm(x_TH, w_H, eps, strict=False)
        return x_TH, h_TH if keep else None, self.model.backend.quantize_input(h_TH, how)

    def experts(self, x_TH, prob_Tk, expert_Tk, num_experts, gate_up, down, inputs, quantized=None):
        self.given.append(quantized)
        if quantized is not None:
            expected = self.model.backend.quantize_input(x_TH, inputs[0])
            assert quantized.first_difference(expected) is None
        return None

    def __getattr__(self, name):
        return lambda *args: None


@pytest.mark.parametrize("fmt", ["w4a4", "w4a16", "bf16"])
@pytest.mark.parametrize("model", [MOE, DENSE, LLAMA], ids=["moe", "dense", "llama"])
def test_what_was_quantized_with_the_norm_gives_the_bits_of_the_steps(model, fmt):
    """BITWISE: log-probs of prompts and of drawn tokens."""
    cfg, wanted = config(model, fmt), requests(4, seed=3)
    steps = engine(cfg).generate(wanted)
    made = engine(cfg)
    made.model.fused = fused = OneKernel(made.model)
    for a, b in zip(steps, made.generate(wanted), strict=True):
        assert a.tokens == b.tokens and a.logprobs == b.logprobs
    moe = model is MOE
    layer = [f"model.layers.{i}" for i in range(2)]
    first = "mlp.experts.0.gate_proj" if moe else "mlp.gate_proj"
    expected = [(f"{p}.{name}", keep) for p in layer for name, keep in (("self_attn.q_proj", False), (first, moe))]
    assert fused.asked[:4] == expected and len(fused.asked) % 4 == 0
    assert all((q is not None) == (fmt == "w4a4") for q in fused.given) and bool(fused.given) == moe


def test_a_wrong_operand_of_the_kernel_shows(monkeypatch):
    """What the kernel quantized is what the GEMM reads, not a second quantization of the norm."""
    cfg, wanted = config(DENSE, "w4a4"), requests(2, seed=4)
    made = engine(cfg)
    made.model.fused = fused = OneKernel(made.model)
    right = made.generate(wanted)
    original = made.model.backend.quantize_input

    def wrong(x_TH, y_TH, w_H, eps, how, reader, keep):
        return x_TH if y_TH is None else x_TH + y_TH, None, original(torch.ones_like(x_TH), how)

    monkeypatch.setattr(fused, "norm_quantize", wrong)
    assert any(a.logprobs != b.logprobs for a, b in zip(right, made.generate(wanted), strict=True))
