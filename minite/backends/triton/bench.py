"""What emulated NVFP4 costs on this GPU at the shapes of Qwen3-30B-A3B, beside BF16 and beside the bound.

`minite bench kernels|gemm|moe|sync`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from minite.backends.reference import Prepared
from minite.backends.triton import fused, grouped, moe, packed, quantize
from minite.backends.triton.backend import TritonBackend
from minite.backends.triton.timing import Run, copy_bandwidth, medians
from minite.formats import QTensor
from minite.formats.nvfp4 import OUTER_MAX

HIDDEN, INTERMEDIATE, EXPERTS, TOP, LAYERS = 2048, 768, 128, 8, 48
TOKENS = 16384
PEAK = 790.0  # TFLOP/s of BF16 products that an H200 was seen to reach
Row = dict[str, float | str]


def bench_quantize() -> list[Row]:
    """Quantizers against the copy bandwidth; every kernel reads its input once and writes its output once."""
    bandwidth = copy_bandwidth()
    x, wide = _normal(8 * TOKENS, HIDDEN), _normal(8 * TOKENS, 2 * INTERMEDIATE)
    weight, amax = _normal(HIDDEN), x.abs().amax().float()
    elements, narrow = x.numel(), wide.numel() // 2
    cases: dict[str, tuple[Run, float]] = {  # name -> run, bytes
        "row-scaled codes": (lambda: quantize.quantize(x, (1, 16), "row"), 2.5625 * elements),
        "codes, amax given": (lambda: quantize.quantize(x, (1, 16), "tensor", amax), 2.5625 * elements),
        "fake quantize": (lambda: quantize.fake_quantize(x, "row"), 4 * elements),
        "RMS norm alone": (lambda: fused.rms_norm(x, weight, 1e-6, ("plain",)), 4 * elements),
        "RMS norm + codes": (lambda: fused.rms_norm(x, weight, 1e-6, ("codes",)), 2.5625 * elements),
        "RMS norm + fake": (lambda: fused.rms_norm(x, weight, 1e-6, ("values",)), 4 * elements),
        "SwiGLU alone": (lambda: fused.swiglu(wide, ("plain",)), 6 * narrow),
        "SwiGLU + codes": (lambda: fused.swiglu(wide, ("codes",)), 4.5625 * narrow),
        "SwiGLU + fake": (lambda: fused.swiglu(wide, ("values",)), 6 * narrow),
    }
    times = medians({name: run for name, (run, _) in cases.items()})
    return [
        {"kernel": name, "ms": times[name], "TB/s": size / times[name] / 1e9,
         "of copy": size / times[name] / 1e9 / bandwidth} for name, (_, size) in cases.items()
    ]  # fmt: skip


def bench_sync() -> list[Row]:
    """BF16 -> packed NVFP4 of one layer's experts, outer scale by expert of the fused gate and up; times 48 layers."""
    bandwidth = copy_bandwidth()
    gate_up, down = _normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN), _normal(EXPERTS, HIDDEN, INTERMEDIATE)
    elements = gate_up.numel() + down.numel()

    def convert() -> None:
        for w in (gate_up, down):
            quantize.quantize(w, (1, 16), "expert")

    def amax() -> None:
        for w in (gate_up, down):
            quantize.outer_amax(w, "expert")

    times = medians({"convert": convert, "amax alone": amax})
    bound = {"convert": 4.5625, "amax alone": 2.0}  # bytes an element: read twice, written once
    return [
        {"part": name, "ms a layer": ms, "ms 48 layers": LAYERS * ms,
         "of copy": bound[name] * elements / ms / 1e9 / bandwidth} for name, ms in times.items()
    ]  # fmt: skip


def bench_gemm() -> list[Row]:
    """Grouped GEMMs by tokens: BF16, naive (weight dequantized for every call), dequantized once, and packed.

    ``bound``: ms that packed W4A4 cannot beat, of reading what it must read and of multiplying.
    """
    bandwidth = copy_bandwidth()
    rows: list[Row] = []
    for name, n, k in (("gate_up", 2 * INTERMEDIATE, HIDDEN), ("down", HIDDEN, INTERMEDIATE)):
        w = _normal(EXPERTS, n, k)
        q = quantize.quantize(w, (1, 16), "expert")
        for tokens in (1, 16, 64, 256, 1024, 4096, TOKENS):
            chosen = torch.rand(tokens, EXPERTS, device="cuda").topk(TOP, dim=-1).indices
            rows_E = moe.Routing.of(chosen, EXPERTS).rows_E
            x = _normal(TOP * tokens, k)
            times = medians(_gemm_runs(x, w, q, rows_E))
            used, total = int((rows_E > 0).sum()), TOP * tokens
            read = used * n * k * 0.5625 + 2 * total * (n + k)
            bound = max(read / bandwidth / 1e9, 2 * total * n * k / PEAK / 1e9)
            rows += [
                {"gemm": name, "tokens": tokens, "run": label, "ms": ms, "speedup": times["torch BF16"] / ms,
                 "bound ms": bound, "TFLOP/s": 2 * total * n * k / ms / 1e9} for label, ms in times.items()
            ]  # fmt: skip
    return rows


def _gemm_runs(x: Tensor, w: Tensor, q: QTensor, rows_E: Tensor) -> dict[str, Run]:
    ends_E = rows_E.cumsum(0, dtype=torch.int32)
    a = Prepared(*quantize.fake_quantize(x, "row"), OUTER_MAX)
    wide, narrow = Prepared(quantize.block_scaled(q), q.amax, OUTER_MAX), packed.pack(q)

    def naive() -> Tensor:
        return F.grouped_mm(x, q.dequantize(torch.bfloat16).transpose(1, 2), offs=ends_E)

    return {
        "torch BF16": lambda: F.grouped_mm(x, w.transpose(1, 2), offs=ends_E),
        "naive": naive,
        "W4A4 dequantized once": lambda: grouped.gemm(a, wide, torch.bfloat16, rows_E),
        "W4A4 packed": lambda: packed.gemm(a, narrow, torch.bfloat16, rows_E),
        "W4A16 packed": lambda: packed.gemm(Prepared(x, None), narrow, torch.bfloat16, rows_E),
    }


def bench_moe() -> list[Row]:
    """A whole MoE layer from its normed input: router, permute, gate_up, SwiGLU, down, combine."""
    gate_up, down = _normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN), _normal(EXPERTS, HIDDEN, INTERMEDIATE)
    router, backend = _normal(EXPERTS, HIDDEN), TritonBackend(strict=False)
    quantized = [backend.quantize(w, "nvfp4_1d") for w in (gate_up, down)]
    wide = [backend.prepare(q) for q in quantized]
    narrow = [backend.prepare(q, decode=True) for q in quantized]
    experts, w4a4, w4a16 = backend.fused.experts, ("nvfp4_row", "nvfp4_row"), ("bf16", "bf16")
    rows: list[Row] = []
    for tokens in (1, 16, 64, 256, 1024, 4096, TOKENS):
        x = _normal(tokens, HIDDEN)

        def routed(x: Tensor = x) -> tuple[Tensor, Tensor]:
            top = torch.mm(x, router.t(), out_dtype=torch.float32).topk(TOP, dim=-1)
            return top.values.softmax(dim=-1), top.indices

        runs: dict[str, Run] = {
            "BF16": lambda x=x, routed=routed: moe_bf16(x, *routed(), gate_up, down),
            "BF16, our GEMM": lambda x=x, routed=routed: moe_bf16(x, *routed(), gate_up, down, ours=True),
            "W4A4": lambda x=x, routed=routed: experts(x, *routed(), EXPERTS, *wide, w4a4),
            "W4A4 packed": lambda x=x, routed=routed: experts(x, *routed(), EXPERTS, *narrow, w4a4),
            "W4A16 packed": lambda x=x, routed=routed: experts(x, *routed(), EXPERTS, *narrow, w4a16),
            "router alone": routed,
        }
        times = medians(runs)
        rows += [
            {"layer": "MoE", "tokens": tokens, "run": name, "ms": ms, "of BF16": ms / times["BF16"]}
            for name, ms in times.items()
        ]
    return rows


def moe_bf16(
    x_TH: Tensor, prob_Tk: Tensor, expert_Tk: Tensor, gate_up: Tensor, down: Tensor, ours: bool = False
) -> Tensor:
    """The same layer in BF16, with torch's grouped product or with ours; all else as in the emulated one."""
    routing = moe.Routing.of(expert_Tk, EXPERTS)
    ends_E = routing.rows_E.cumsum(0, dtype=torch.int32)

    def product(a_RK: Tensor, b_ENK: Tensor) -> Tensor:
        if ours:
            return grouped.gemm(Prepared(a_RK, None), Prepared(b_ENK, None), torch.bfloat16, routing.rows_E)
        return F.grouped_mm(a_RK, b_ENK.transpose(1, 2), offs=ends_E)

    h = fused.swiglu(product(x_TH[routing.token_R], gate_up), ("plain",))
    assert h.plain is not None
    return moe.combine(product(h.plain, down), prob_Tk, routing.position_Tk)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    cells = [list(rows[0])] + [[v if isinstance(v, str) else f"{v:.4g}" for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


BENCHES = {"kernels": bench_quantize, "sync": bench_sync, "gemm": bench_gemm, "moe": bench_moe}


def card() -> str:
    """What was measured."""
    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
