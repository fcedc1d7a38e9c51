"""What emulated NVFP4 costs on this GPU at the shapes of Qwen3-30B-A3B, beside BF16 and beside the bound.

`python -m minite.backends.triton.bench [quantize|sync|gemm|moe ...] [--json FILE]`; without names all of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from minite.backends.reference import Prepared
from minite.backends.triton import fused, grouped, moe, quantize
from minite.backends.triton.backend import TritonBackend
from minite.backends.triton.timing import Run, copy_bandwidth, medians

HIDDEN, INTERMEDIATE, EXPERTS, TOP, LAYERS = 2048, 768, 128, 8, 48
TOKENS = 16384
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
    """Grouped GEMMs: torch's BF16 product, ours with scales in the epilogue, ours without."""
    rows: list[Row] = []
    for tokens in (64, 1024, TOKENS):
        routing = moe.Routing.of(torch.rand(tokens, EXPERTS, device="cuda").topk(TOP, dim=-1).indices, EXPERTS)
        for name, n, k in (("gate_up", 2 * INTERMEDIATE, HIDDEN), ("down", HIDDEN, INTERMEDIATE)):
            a, b = _normal(TOP * tokens, k), _normal(EXPERTS, n, k)
            times = medians(_gemm_runs(a, b, routing.rows_E))
            rows += [
                {"gemm": name, "tokens": tokens, "run": label, "ms": ms, "of BF16": ms / times["torch BF16"],
                 "TFLOP/s": 2 * a.shape[0] * n * k / ms / 1e9} for label, ms in times.items()
            ]  # fmt: skip
    return rows


def _gemm_runs(a: Tensor, b: Tensor, rows_E: Tensor) -> dict[str, Run]:
    ends_E = rows_E.cumsum(0, dtype=torch.int32)
    scaled_a = Prepared(a, a.float().abs().amax(1), 2688.0)
    scaled_b = Prepared(b, b.float().abs().amax((1, 2)), 2688.0)
    return {
        "torch BF16": lambda: F.grouped_mm(a, b.transpose(1, 2), offs=ends_E),
        "BF16": lambda: grouped.gemm(Prepared(a, None), Prepared(b, None), torch.bfloat16, rows_E),
        "scaled": lambda: grouped.gemm(scaled_a, scaled_b, torch.bfloat16, rows_E),
    }


def bench_moe() -> list[Row]:
    """A whole MoE layer from its normed input: router, permute, gate_up, SwiGLU, down, combine."""
    gate_up, down = _normal(EXPERTS, 2 * INTERMEDIATE, HIDDEN), _normal(EXPERTS, HIDDEN, INTERMEDIATE)
    router = _normal(EXPERTS, HIDDEN)
    packed = [_prepared(w) for w in (gate_up, down)]
    experts, inputs = TritonBackend(strict=False).fused.experts, ("nvfp4_row", "nvfp4_row")
    rows: list[Row] = []
    for tokens in (1024, 4096, TOKENS):
        x = _normal(tokens, HIDDEN)

        def routed(x: Tensor = x) -> tuple[Tensor, Tensor]:
            top = torch.mm(x, router.t(), out_dtype=torch.float32).topk(TOP, dim=-1)
            return top.values.softmax(dim=-1), top.indices

        runs: dict[str, Run] = {
            "BF16": lambda x=x, routed=routed: moe_bf16(x, *routed(), gate_up, down),
            "BF16, our GEMM": lambda x=x, routed=routed: moe_bf16(x, *routed(), gate_up, down, ours=True),
            "W4A4": lambda x=x, routed=routed: experts(x, *routed(), EXPERTS, *packed, inputs),
            "W4A4, torch GEMM": lambda x=x, routed=routed: experts_w4a4_torch(x, *routed(), *packed),
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


def experts_w4a4_torch(x_TH: Tensor, prob_Tk: Tensor, expert_Tk: Tensor, gate_up: Prepared, down: Prepared) -> Tensor:
    """W4A4 with torch's grouped product: sums are rounded before the outer scales, which SwiGLU and combine apply."""
    assert gate_up.amax is not None and down.amax is not None
    values_TH, amax_T = quantize.fake_quantize(x_TH, "row")
    routing = moe.Routing.of(expert_Tk, EXPERTS)
    ends_E = routing.rows_E.cumsum(0, dtype=torch.int32)
    expert_R = torch.searchsorted(
        ends_E, torch.arange(len(routing.token_R), device=x_TH.device, dtype=torch.int32), right=True
    )
    alpha = 1 / 2688**2
    sums = F.grouped_mm(values_TH[routing.token_R], gate_up.values.transpose(1, 2), offs=ends_E)
    h = fused.swiglu(sums, ("values",), amax_T[routing.token_R] * gate_up.amax[expert_R] * alpha)
    assert h.values is not None and h.amax is not None
    y_RH = F.grouped_mm(h.values, down.values.transpose(1, 2), offs=ends_E)
    factor_R = h.amax * down.amax[expert_R] * alpha
    return moe.combine(y_RH, prob_Tk * factor_R[routing.position_Tk.long()], routing.position_Tk)


def _prepared(w: Tensor) -> Prepared:
    q = quantize.quantize(w, (1, 16), "expert")
    return Prepared(quantize.block_scaled(q), q.amax, q.outer_max)


def _normal(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    cells = [list(rows[0])] + [[v if isinstance(v, str) else f"{v:.4g}" for v in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in cells) for i in range(len(cells[0]))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells)


BENCHES = {"quantize": bench_quantize, "sync": bench_sync, "gemm": bench_gemm, "moe": bench_moe}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="|".join(BENCHES), help="which to run; default all")
    parser.add_argument("--json", type=Path, help="also write the rows there")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(BENCHES)
    if unknown:
        parser.error(f"unknown bench {', '.join(sorted(unknown))}; expected {', '.join(BENCHES)}")
    card = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}"
    print(card)
    torch.manual_seed(0)
    results = {}
    for name in arguments.names or BENCHES:
        results[name] = BENCHES[name]()
        print(f"\n{name}\n{table(results[name])}", flush=True)
        torch.cuda.empty_cache()
    if arguments.json is not None:
        arguments.json.write_text(json.dumps({"card": card, **results}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
