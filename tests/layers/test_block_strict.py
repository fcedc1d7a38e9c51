"""A whole decoder layer in strict W4A4: packed prefill equals decoding one token at a time, in any company."""

import exact
import pytest
import torch

from minite.backends.registry import get_backend
from minite.layers import ops
from minite.layers.grouped_matmul import quant_grouped_matmul
from minite.layers.matmul import LinearSpec, quant_matmul

HEADS, KV_HEADS, DIM, HIDDEN, EXPERTS, TOP_K, WIDE = 4, 2, 16, 64, 4, 2, 32
LENGTHS = [5, 1, 9, 3]
EPS, SCALE = 1e-6, DIM**-0.5


class Layer:
    """Qwen3-MoE's decoder layer and a small LM head, written with the shared operations only."""

    def __init__(self, input_format, dtype, strict=True):
        self.backend, self.strict = get_backend("reference", device="cpu", strict=strict), strict
        self.spec = LinearSpec("nvfp4_1d", input_format, "bf16", "bf16")
        shapes = {
            "qkv": ((HEADS + 2 * KV_HEADS) * DIM, HIDDEN),
            "o": (HIDDEN, HEADS * DIM),
            "router": (EXPERTS, HIDDEN),
            "fc1": (EXPERTS, 2 * WIDE, HIDDEN),
            "fc2": (EXPERTS, HIDDEN, WIDE),
            "head": (50, HIDDEN),
        }
        self.w = {
            name: exact.randn(*s, dtype=dtype, seed=i) / s[-1] ** 0.5 for i, (name, s) in enumerate(shapes.items())
        }
        self.norm = {name: 1 + 0.1 * exact.randn(n, dtype=dtype, seed=9) for name, n in (("h", HIDDEN), ("qk", DIM))}

    def linear(self, name, x):
        return quant_matmul(x, self.w[name], self.spec, self.backend)

    def experts(self, name, x, rows_E):
        return quant_grouped_matmul(x, self.w[name], rows_E, self.spec, self.backend)

    def forward(self, x, positions, attend):
        """Log-probs [T, 50]; ``attend(q, k, v)`` is the only part that knows of other tokens."""
        qkv = self.linear("qkv", ops.rms_norm(x, self.norm["h"], EPS, self.strict))
        q, k, v = qkv.view(len(x), -1, DIM).split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        cos, sin = ops.rope_cos_sin(positions, DIM, 1e6)
        q, k = (
            ops.apply_rope(ops.rms_norm(t, self.norm["qk"], EPS, self.strict), cos, sin, self.strict) for t in (q, k)
        )
        x = x + self.linear("o", attend(q, k, v).flatten(1))
        h = ops.rms_norm(x, self.norm["h"], EPS, self.strict)
        prob_Tk, expert_Tk = ops.route_topk(ops.wide_linear(h, self.w["router"], self.strict), TOP_K)
        h_RH, token_R, rows_E, slot_R = ops.moe_permute(h, expert_Tk, EXPERTS)
        y_RH = self.experts("fc2", ops.swiglu(self.experts("fc1", h_RH, rows_E), self.strict), rows_E)
        x = x + ops.moe_combine(y_RH, prob_Tk.flatten()[slot_R], token_R, len(x), self.strict)
        return x, ops.log_softmax(ops.wide_linear(x, self.w["head"], self.strict), self.strict)

    def prefill(self, x, cu):
        positions = torch.cat([torch.arange(n) for n in cu.diff().tolist()])
        return self.forward(x, positions, lambda q, k, v: ops.attention(q, k, v, cu, SCALE, self.strict))

    def decode(self, x, cu, order):
        """Token by token; ``order`` shuffles the sequences of each step's batch."""
        caches = torch.full((2, len(LENGTHS), max(LENGTHS), KV_HEADS, DIM), float("nan"), dtype=x.dtype)
        out, logprob = torch.empty_like(x), torch.empty(len(x), 50, dtype=ops.work_dtype(self.strict))
        for step in range(max(LENGTHS)):
            live = torch.tensor([s for s in order if LENGTHS[s] > step])

            def attend(q, k, v, live=live, step=step):
                caches[0, live, step], caches[1, live, step] = k, v
                lengths = torch.full((len(live),), step + 1)
                return ops.attention_decode(q, caches[0, live], caches[1, live], lengths, SCALE, self.strict)

            token = cu[live] + step
            out[token], logprob[token] = self.forward(x[token], torch.full((len(live),), step), attend)
        return out, logprob


def inputs(dtype):
    return exact.randn(sum(LENGTHS), HIDDEN, dtype=dtype, seed=20), torch.tensor([0, *LENGTHS]).cumsum(0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strict_decode_equals_packed_prefill(dtype):
    layer, (x, cu) = Layer("nvfp4_row", dtype), inputs(dtype)
    hidden, logprob = layer.prefill(x, cu)
    decoded_hidden, decoded_logprob = layer.decode(x, cu, order=[2, 0, 3, 1])
    assert torch.equal(hidden, decoded_hidden)
    # Log-probs stay FP64 and are not rounded: only the order of the LM head's sum is left, 64 terms of about 1.
    torch.testing.assert_close(decoded_logprob, logprob, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_strict_prefill_alone_equals_prefill_in_a_batch(dtype):
    layer, (x, cu) = Layer("nvfp4_row", dtype), inputs(dtype)
    hidden, _ = layer.prefill(x, cu)
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        alone, _ = layer.prefill(x[start:end], torch.tensor([0, end - start]))
        assert torch.equal(alone, hidden[start:end])


def test_a_tensor_wide_scale_breaks_it():
    """The control: with one amax over the batch a token does depend on its company, strict sums or not."""
    layer, (x, cu) = Layer("nvfp4_tensor", torch.bfloat16), inputs(torch.bfloat16)
    hidden, logprob = layer.prefill(x, cu)
    _, decoded_logprob = layer.decode(x, cu, order=[0, 1, 2, 3])
    assert (decoded_logprob - logprob).abs().max() > 1e-3
