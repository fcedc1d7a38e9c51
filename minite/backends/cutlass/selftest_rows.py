"""Cases of the self-test for the kernels that read and write rows: quantizers, norm, what moves rows and scales."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minite.backends.cutlass import expert_rows, norm, ops, wgrad
from minite.formats import QTensor, layout, nvfp4

Check = Callable[[], str | None]  # None, or what is wrong
Run = Callable[[], object]
DEVICE = "cuda"
COMPARED = 256  # rows of a large matrix that are compared, at its start and at its end
_CODES = 0.5 + 1 / 16  # bytes an element
_EPS = 1e-6


@dataclass(frozen=True)
class Case:
    """One kernel on one problem."""

    kernel: str
    what: str
    check: Check
    run: Run
    bytes: float  # that must be read and written
    flops: float = 0


def quantize_case(rows: int, k: int) -> Case:
    x_MK = random_rows(rows, k, seed=rows + k)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        out: tuple[Tensor, Tensor, Tensor] = ops.quantize(x_MK, None, None, False, 1, False)
        return out

    def check() -> str | None:
        codes, scales, amax = run()
        got = QTensor("nvfp4", codes, scales.view(torch.float8_e4m3fn), amax, (rows, k), (1, 16))
        parts = slice(0, COMPARED), slice(max(rows - COMPARED, 0), rows)
        differences = (
            part_of(got, part).to("cpu").first_difference(nvfp4.quantize(x_MK[part].cpu(), (1, 16), "row"))
            for part in parts
        )
        return next((d for d in differences if d), None)

    return Case("quantize", f"row-scaled {rows} x {k}", check, run, rows * k * (2 + _CODES) + 4 * rows)


def weight_case(block_rows: int, n: int, k: int) -> Case:
    """Measured amax, then codes: what the learner does with a weight after every step."""
    w_NK = random_rows(n, k, seed=n + k)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        amax = ops.amax(w_NK, 1)
        codes, scales, _ = ops.quantize(w_NK, amax, None, False, block_rows, False)
        return codes, scales, amax[0]

    def check() -> str | None:
        codes, scales, amax = run()
        got = QTensor("nvfp4", codes, scales.view(torch.float8_e4m3fn), amax, (n, k), (block_rows, 16))
        return got.to("cpu").first_difference(nvfp4.quantize(w_NK.cpu(), (block_rows, 16), "tensor"))

    return Case("quantize", f"weight {block_rows}x16 {n} x {k}", check, run, n * k * (4 + _CODES))


def swiglu_case(rows: int, k: int) -> Case:
    gate_up = random_rows(rows, 2 * k, seed=rows)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        out: tuple[Tensor, Tensor, Tensor] = ops.quantize(gate_up, None, None, False, 1, True)
        return out

    def check() -> str | None:
        codes, scales, amax = (t[:COMPARED] for t in run())
        gate, up = gate_up[:COMPARED].float().chunk(2, dim=1)
        h_RK = (torch.nn.functional.silu(gate) * up).bfloat16()
        got = QTensor("nvfp4", codes, scales.view(torch.float8_e4m3fn), amax, tuple(h_RK.shape), (1, 16))
        return got.to("cpu").first_difference(nvfp4.quantize(h_RK.cpu(), (1, 16), "row"))

    return Case("quantize", f"SwiGLU, row-scaled {rows} x {k}", check, run, rows * k * (4 + _CODES) + 4 * rows)


def norm_case(rows: int, k: int, *, summed: bool) -> Case:
    """RMS norm, of a sum or alone, and its codes, without the norm itself; the definition is computed on the CPU."""
    x_MK, weight_K = random_rows(rows, k, seed=rows), random_rows(1, k, seed=k)[0]
    addend = random_rows(rows, k, seed=rows + 1) if summed else None

    def run() -> tuple[Tensor, ...]:
        out: tuple[Tensor, ...] = norm.norm_quantize(x_MK, addend, weight_K, _EPS, False, False)
        return out

    def check() -> str | None:
        total, _, codes, scales, amax = run()
        got = QTensor("nvfp4", codes, scales.view(torch.float8_e4m3fn), amax, (rows, k), (1, 16))
        for part in (slice(0, COMPARED), slice(max(rows - COMPARED, 0), rows)):
            t_MK = x_MK[part].cpu() if addend is None else x_MK[part].cpu() + addend[part].cpu()
            if addend is not None and not torch.equal(total[part].cpu(), t_MK):
                return "the sum differs"
            expected = nvfp4.quantize(_norm(t_MK, weight_K.cpu()), (1, 16), "row")
            if difference := part_of(got, part).to("cpu").first_difference(expected):
                return difference
        return None

    what = "of a sum, " if summed else ""
    return Case("norm + codes", f"{what}{rows} x {k}", check, run, rows * k * ((6 if summed else 2) + _CODES))


def _norm(t_MK: Tensor, weight_K: Tensor) -> Tensor:
    """BF16, as backends.base.Fused has it. The root in float64: torch's float32 root is not exact on every CPU."""
    mean_M1 = t_MK.double().square().sum(1, keepdim=True).float() / t_MK.shape[1]
    return (t_MK.float() * (1 / (mean_M1 + _EPS).double().sqrt().float()) * weight_K.float()).bfloat16()


def swizzle_columns_case(columns_E: tuple[int, ...], n: int) -> Case:
    """Block scales of runs of columns to the tiles of each; the last 64 columns belong to nobody."""
    total = sum(columns_E) + 64
    generator = torch.Generator(DEVICE).manual_seed(n)
    scales_NG = torch.randint(0, 0x7F, (n, total // 16), generator=generator, device=DEVICE, dtype=torch.uint8)
    starts = wgrad.run_starts(torch.tensor(columns_E, device=DEVICE))

    def run() -> Tensor:
        out: Tensor = wgrad.swizzle_columns(scales_NG, starts)
        return out

    def check() -> str | None:
        tiles, linear, height = run().cpu(), scales_NG.cpu(), layout.padded_shape(n, 4)[0]
        edges = [int(start) // 16 for start in starts]
        for e, (first, end) in enumerate(zip(edges, edges[1:], strict=False)):
            part = layout.unswizzle(tiles[first * height : end * height], n, end - first)
            if not torch.equal(part, linear[:, first:end]):
                return f"run {e} differs"
        return None

    return Case("swizzle", f"runs {'+'.join(map(str, columns_E))} x {n}", check, run, 2 * n * total / 16)


def _routed(tokens: int, experts: int, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts [T, k] drawn evenly -> (token_R, rows_E, position_Tk int32), as layers.moe.moe_permute sorts rows."""
    generator = torch.Generator(DEVICE).manual_seed(top)
    expert_Tk = torch.rand(tokens, experts, generator=generator, device=DEVICE).topk(top).indices
    slot_R = expert_Tk.flatten().argsort(stable=True)
    rows_E = torch.bincount(expert_Tk.flatten(), minlength=experts)
    return slot_R // top, rows_E, slot_R.argsort().to(torch.int32).view(tokens, top)


def permute_case(tokens: int, experts: int, top: int, k: int) -> Case:
    token_R, rows_E, _ = _routed(tokens, experts, top)
    x_TK, offsets = random_rows(tokens, k, seed=top), ops.expert_offsets(rows_E)
    once = ops.quantize(x_TK, None, None, False, 1, False)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        out: tuple[Tensor, Tensor, Tensor] = expert_rows.permute(*once, token_R, offsets)
        return out

    def check() -> str | None:
        """Against the tokens' rows gathered first, then quantized: the definition."""
        (codes, tiles, amax), sizes = run(), rows_E.cpu()
        end = int(layout.expert_offsets(sizes, k // 16)[-1])
        scales = layout.unswizzle_experts(tiles[:end].cpu(), sizes, k // 16).view(torch.float8_e4m3fn)
        got = QTensor("nvfp4", codes.cpu(), scales, amax.cpu(), (len(token_R), k), (1, 16))
        parts = slice(0, COMPARED), slice(len(token_R) - COMPARED, len(token_R))
        differences = (
            part_of(got, p).first_difference(nvfp4.quantize(x_TK[token_R[p]].cpu(), (1, 16), "row")) for p in parts
        )
        return next((d for d in differences if d), None)

    return Case("permute", f"{tokens} x {k}, {top} experts each", check, run, (1 + top) * tokens * (k * _CODES + 4))


def combine_case(tokens: int, experts: int, top: int, width: int) -> Case:
    token_R, _, position_Tk = _routed(tokens, experts, top)
    y_RH = random_rows(tokens * top, width, seed=top)
    generator = torch.Generator(DEVICE).manual_seed(1)
    prob_Tk = torch.rand(tokens, top, generator=generator, device=DEVICE)

    def run() -> Tensor:
        out: Tensor = expert_rows.combine(y_RH, prob_Tk, position_Tk)
        return out

    def check() -> str | None:
        """The sum in the order of the rows, a float32 product and sum at a time."""
        position_ck = position_Tk[:COMPARED].long().sort(dim=1)
        weight_ck = prob_Tk[:COMPARED].gather(1, position_ck.indices)
        sum_cH = torch.zeros(len(weight_ck), width, device=DEVICE)
        for j in range(top):
            sum_cH += y_RH[position_ck.values[:, j]].float() * weight_ck[:, j, None]
        wrong = run()[:COMPARED] != sum_cH.bfloat16()
        return f"{int(wrong.sum())} of {wrong.numel()} elements differ" if bool(wrong.any()) else None

    return Case("combine", f"{tokens} x {width}, {top} experts each", check, run, (1 + top) * tokens * width * 2.0)


def part_of(q: QTensor, index: int | slice) -> QTensor:
    """Some rows of a matrix, or one expert."""
    assert q.block_scale is not None and q.amax is not None
    codes = q.codes[index]
    shape = (codes.shape[0], q.shape[-1])
    return QTensor(q.format, codes, q.block_scale[index], q.amax[index], shape, q.block)


def random_rows(rows: int, k: int, seed: int) -> Tensor:
    """BF16 rows whose sizes differ by powers of two, made on the device."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    size_M1 = torch.exp2(torch.randint(-4, 5, (rows, 1), generator=generator, device=DEVICE).bfloat16())
    return torch.randn(rows, k, generator=generator, device=DEVICE, dtype=torch.bfloat16) * size_M1
