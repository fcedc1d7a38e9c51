"""The fused experts of the native backend on a GPU against the steps, in the reference's arithmetic. QUANT."""

from __future__ import annotations

import pytest
import torch
from cases import normal, seeded

from minite.backends.cutlass import library, ops
from minite.backends.cutlass.weights import NativeWeight
from minite.backends.triton.backend import TritonBackend
from minite.errors import UserError
from minite.formats import QTensor, block_scaled, layout, nvfp4
from minite.layers.pointwise import swiglu

pytestmark = pytest.mark.gpu


def test_experts_of_a_layer_as_step_by_step(monkeypatch):
    """The whole stretch in fused kernels against the reference's steps; on sm_90 with the twin in place of FP4."""
    pytest.importorskip("triton", reason="routing is a kernel of the triton backend")
    try:
        architecture = library.for_device(torch.device("cuda", torch.cuda.current_device())).architecture
    except UserError as error:
        pytest.skip(str(error))
    from minite.backends.cutlass.fused import NativeFused

    tokens, hidden, wide, experts, top = 70, 96, 64, 6, 2
    gate_up = nvfp4.quantize(normal(experts, 2 * wide, hidden, seed=70), (1, 16), "expert")
    down = nvfp4.quantize(normal(experts, hidden, wide, seed=71), (1, 16), "expert")
    x_TH, logits = normal(tokens, hidden, seed=72), torch.randn(tokens, experts, generator=seeded(73))
    logits[:, 3] = -torch.inf  # one expert has no rows
    prob_Tk, expert_Tk = logits.softmax(-1).topk(top)
    emulation = TritonBackend(strict=False)
    if architecture < 100:
        monkeypatch.setattr(ops, "gemm", twin_of_tiles(ops.gemm))
    got = NativeFused(emulation).experts(
        x_TH.cuda(), prob_Tk.cuda(), expert_Tk.cuda(), experts,
        NativeWeight.of(gate_up.to("cuda"), emulation), NativeWeight.of(down.to("cuda"), emulation),
        ("nvfp4_row", "nvfp4_row"),
    )  # fmt: skip
    expected = torch.zeros(tokens, hidden)
    for e in range(experts):
        token, choice = (expert_Tk == e).nonzero(as_tuple=True)
        x = nvfp4.quantize(x_TH[token], (1, 16), "row").dequantize()
        h = swiglu((x @ gate_up.dequantize()[e].T).bfloat16(), False)
        y = (nvfp4.quantize(h, (1, 16), "row").dequantize() @ down.dequantize()[e].T).bfloat16()
        expected.index_add_(0, token, y.float() * prob_Tk[token, choice, None])
    # an input code may flip where a sum rounds to another BF16 value: one code of 64 is a few per cent of an element
    error = (got.float().cpu() - expected).norm() / expected.norm()
    assert float(error) < 5e-3


def twin_of_tiles(gemm):
    """ops.gemm of packed operands on sm_90: unpacks codes and tiles, then multiplies with the twin."""

    def multiply(a, a_tiles, row_amax, b, b_tiles, weight_amax, offsets, alpha, out_dtype):
        experts, n, half = b.shape
        sizes, columns = offsets[0].diff().cpu(), half // 8
        end = int(layout.expert_offsets(sizes, columns)[-1])
        a_scales = layout.unswizzle_experts(a_tiles[:end].cpu(), sizes, columns).view(torch.float8_e4m3fn)
        b_scales = layout.unswizzle(b_tiles.cpu(), n, columns).view(torch.float8_e4m3fn)
        a_q = QTensor("nvfp4", a.cpu(), a_scales, row_amax.cpu(), (len(a), 2 * half), (1, 16))
        b_q = QTensor("nvfp4", b.cpu(), b_scales, weight_amax.cpu(), (experts, n, 2 * half), (1, 16))
        values = block_scaled(a_q).cuda(), block_scaled(b_q).cuda()
        return gemm(values[0], None, row_amax, values[1], None, weight_amax, offsets, alpha, out_dtype)

    return multiply
