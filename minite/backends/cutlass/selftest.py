"""Every kernel of the native backend against the reference, and its speed: `minite doctor --self-test`.

On sm_90 the GEMMs are the BF16 twin; which of the kernels ran, and which did not and why, is in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minite.backends.cutlass import expert_rows, ops
from minite.backends.cutlass.library import Library, architecture_of, load
from minite.backends.triton.timing import copy_bandwidth, medians
from minite.errors import UserError
from minite.formats import QTensor, block_scaled, layout, nvfp4
from minite.formats.nvfp4 import OUTER_MAX

Check = Callable[[], str | None]  # None, or what is wrong
Run = Callable[[], object]
KERNELS = ("quantize", "permute", "combine", "gemm dense", "gemm grouped")
_ALPHA = 1 / OUTER_MAX**2
# rows, K: a single block, one row, no whole tile of 4 scales, what a layer has, rows beyond what a warp keeps
_QUANTIZE = ((1, 16), (1, 2048), (300, 80), (131072, 2048), (131072, 768), (64, 8192), (2**20, 768))
_LAYER = (131072, 768)  # rows of experts and their width; as a weight: 128 experts of 1024 x 768
_TOKENS = (16384, 128, 8)  # tokens of a layer, experts, choices of a token
_GEMM_MNK = ((1, 1536, 2048), (300, 520, 2080), (4096, 4096, 4096))
_ROWS = ((3, 0, 40, 1, 0), (0, 0, 0, 0, 7), (300, 0, 129, 128, 1), (4096, 0, 4096, 4096, 4096))
_GROUPED_NK = ((136, 96), (1536, 2048))
_HIDDEN = 2048
_DEVICE = "cuda"
_COMPARED = 256  # rows of a large matrix that are compared, at its start and at its end


@dataclass(frozen=True)
class Case:
    """One kernel on one problem."""

    kernel: str
    what: str
    check: Check
    run: Run
    bytes: float  # that must be read and written
    flops: float = 0


def self_test() -> tuple[str, bool]:
    """(the table, whether nothing that ran was wrong)."""
    refusal = _refusal()
    if refusal is not None:
        return "\n".join(["native kernels", *(f"  {name}: not run, {refusal}" for name in KERNELS)]), True
    architecture = _library().architecture
    lines = [f"native kernels, sm_{architecture}" + (", GEMMs as BF16 twin" if architecture < 100 else "")]
    copied = copy_bandwidth()
    lines.append(
        f"  {'kernel':14} {'problem':34} {'ms':>9} {'TB/s':>6} {'of copy':>8}  verdict; copy {copied:.2f} TB/s"
    )
    healthy = True
    for case in _cases(architecture):
        fault = case.check()
        healthy = healthy and fault is None
        ms = medians({"it": case.run}, repeats=5)["it"]
        speed = case.bytes / ms / 1e9
        verdict = "ok" if fault is None else f"FAILED, {fault}"
        rates = f"{ms:9.4f} {speed:6.2f} {speed / copied:8.0%} {case.flops / ms / 1e9:8.0f}"
        lines.append(f"  {case.kernel:14} {case.what:34} {rates}  {verdict}")
        torch.cuda.empty_cache()
    if architecture < 100:
        lines.append("  FP4 tensor cores: not run, this GPU has none")
    return "\n".join(lines), healthy


def _refusal() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        _library()
    except UserError as error:
        return str(error)
    return None


def _library() -> Library:
    capability = torch.cuda.get_device_capability()
    architecture = architecture_of(capability)
    if architecture is None:
        raise UserError("no kernels for sm_{}{}".format(*capability))
    return load(architecture.name)


def _cases(architecture: int) -> Iterator[Case]:
    for rows, k in _QUANTIZE:
        yield _quantize_case(rows, k)
    yield _swiglu_case(*_LAYER)
    for block_rows in (1, 16):
        yield _weight_case(block_rows, *_LAYER)
    yield _permute_case(*_TOKENS, _HIDDEN)
    yield _combine_case(*_TOKENS, _HIDDEN)
    for m, n, k in _GEMM_MNK:
        yield _gemm_case(architecture, (m,), n, k, grouped=False)
    for rows_E in _ROWS:
        for n, k in _GROUPED_NK:
            yield _gemm_case(architecture, rows_E, n, k, grouped=True)


def _quantize_case(rows: int, k: int) -> Case:
    x_MK = _random(rows, k, seed=rows + k)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        out: tuple[Tensor, Tensor, Tensor] = ops.quantize(x_MK, None, None, False, 1, False)
        return out

    def check() -> str | None:
        codes, scales, amax = run()
        got = QTensor("nvfp4", codes, scales.view(torch.float8_e4m3fn), amax, (rows, k), (1, 16))
        parts = slice(0, _COMPARED), slice(max(rows - _COMPARED, 0), rows)
        differences = (
            _part(got, part).to("cpu").first_difference(nvfp4.quantize(x_MK[part].cpu(), (1, 16), "row"))
            for part in parts
        )
        return next((d for d in differences if d), None)

    return Case("quantize", f"row-scaled {rows} x {k}", check, run, rows * k * (2 + 0.5 + 1 / 16) + 4 * rows)


def _weight_case(block_rows: int, n: int, k: int) -> Case:
    """Measured amax, then codes: what the learner does with a weight after every step."""
    w_NK = _random(n, k, seed=n + k)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        amax = ops.amax(w_NK, 1)
        codes, scales, _ = ops.quantize(w_NK, amax, None, False, block_rows, False)
        return codes, scales, amax[0]

    def check() -> str | None:
        codes, scales, amax = run()
        got = QTensor("nvfp4", codes, scales.view(torch.float8_e4m3fn), amax, (n, k), (block_rows, 16))
        return got.to("cpu").first_difference(nvfp4.quantize(w_NK.cpu(), (block_rows, 16), "tensor"))

    return Case("quantize", f"weight {block_rows}x16 {n} x {k}", check, run, n * k * (4 + 0.5 + 1 / 16))


def _swiglu_case(rows: int, k: int) -> Case:
    gate_up = _random(rows, 2 * k, seed=rows)

    def run() -> tuple[Tensor, Tensor, Tensor]:
        out: tuple[Tensor, Tensor, Tensor] = ops.quantize(gate_up, None, None, False, 1, True)
        return out

    def check() -> str | None:
        codes, scales, amax = (t[:_COMPARED] for t in run())
        gate, up = gate_up[:_COMPARED].float().chunk(2, dim=1)
        h_RK = (torch.nn.functional.silu(gate) * up).bfloat16()
        got = QTensor("nvfp4", codes, scales.view(torch.float8_e4m3fn), amax, tuple(h_RK.shape), (1, 16))
        return got.to("cpu").first_difference(nvfp4.quantize(h_RK.cpu(), (1, 16), "row"))

    return Case("quantize", f"SwiGLU, row-scaled {rows} x {k}", check, run, rows * k * (4 + 0.5 + 1 / 16) + 4 * rows)


def _routed(tokens: int, experts: int, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Experts [T, k] drawn evenly -> (token_R, rows_E, position_Tk int32), as layers.moe.moe_permute sorts rows."""
    generator = torch.Generator(_DEVICE).manual_seed(top)
    expert_Tk = torch.rand(tokens, experts, generator=generator, device=_DEVICE).topk(top).indices
    slot_R = expert_Tk.flatten().argsort(stable=True)
    rows_E = torch.bincount(expert_Tk.flatten(), minlength=experts)
    return slot_R // top, rows_E, slot_R.argsort().to(torch.int32).view(tokens, top)


def _permute_case(tokens: int, experts: int, top: int, k: int) -> Case:
    token_R, rows_E, _ = _routed(tokens, experts, top)
    x_TK, offsets = _random(tokens, k, seed=top), ops.expert_offsets(rows_E)
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
        parts = slice(0, _COMPARED), slice(len(token_R) - _COMPARED, len(token_R))
        differences = (
            _part(got, p).first_difference(nvfp4.quantize(x_TK[token_R[p]].cpu(), (1, 16), "row")) for p in parts
        )
        return next((d for d in differences if d), None)

    return Case("permute", f"{tokens} x {k}, {top} experts each", check, run, (1 + top) * tokens * (k * 0.5625 + 4))


def _combine_case(tokens: int, experts: int, top: int, width: int) -> Case:
    token_R, _, position_Tk = _routed(tokens, experts, top)
    y_RH = _random(tokens * top, width, seed=top)
    generator = torch.Generator(_DEVICE).manual_seed(1)
    prob_Tk = torch.rand(tokens, top, generator=generator, device=_DEVICE)

    def run() -> Tensor:
        out: Tensor = expert_rows.combine(y_RH, prob_Tk, position_Tk)
        return out

    def check() -> str | None:
        """The sum in the order of the rows, a float32 product and sum at a time."""
        position_ck = position_Tk[:_COMPARED].long().sort(dim=1)
        weight_ck = prob_Tk[:_COMPARED].gather(1, position_ck.indices)
        sum_cH = torch.zeros(len(weight_ck), width, device=_DEVICE)
        for j in range(top):
            sum_cH += y_RH[position_ck.values[:, j]].float() * weight_ck[:, j, None]
        wrong = run()[:_COMPARED] != sum_cH.bfloat16()
        return f"{int(wrong.sum())} of {wrong.numel()} elements differ" if bool(wrong.any()) else None

    return Case("combine", f"{tokens} x {width}, {top} experts each", check, run, (1 + top) * tokens * width * 2.0)


def _gemm_case(architecture: int, rows_E: tuple[int, ...], n: int, k: int, *, grouped: bool) -> Case:
    experts, m = len(rows_E), sum(rows_E)
    a = nvfp4.quantize(_random(m, k, seed=1).cpu(), (1, 16), "row")
    b = nvfp4.quantize(_random(experts * n, k, seed=2).cpu().view(experts, n, k), (1, 16), "expert")
    offsets = ops.expert_offsets(torch.tensor(rows_E, device=_DEVICE)) if grouped else None
    operands = _operands(architecture, a.to(_DEVICE), b.to(_DEVICE), offsets)

    def run() -> Tensor:
        out: Tensor = ops.gemm(*operands, offsets, _ALPHA, torch.bfloat16)
        return out

    def check() -> str | None:
        """As backends.doctor: FP32 sums of K exact products in any order, and half a unit of the BF16 result."""
        got, first = run().double().cpu(), 0
        for e, rows in enumerate(rows_E):
            part = slice(first, first + min(rows, _COMPARED))
            first += rows
            a_MK, b_NK = _part(a, part).dequantize(torch.float64), _part(b, e).dequantize(torch.float64)
            exact, magnitude = a_MK @ b_NK.T, a_MK.abs() @ b_NK.abs().T
            sums = (k + 8) * 2.0**-24 * magnitude
            bound = sums + 2.0**-8 * (exact.abs() + sums)
            worst = float(((got[part] - exact).abs() - bound).nan_to_num(nan=torch.inf).max()) if rows else 0.0
            if worst > 0:
                return f"expert {e}: {worst:.3g} above the bound"
        return None

    width = 2 if architecture < 100 else 0.5625
    name = "gemm grouped" if grouped else "gemm dense"
    problem = f"{'+'.join(map(str, rows_E))} x {n} x {k}"
    used = sum(1 for rows in rows_E if rows)
    return Case(name, problem, check, run, width * k * (m + used * n) + 2 * m * n, 2.0 * m * n * k)


def _part(q: QTensor, index: int | slice) -> QTensor:
    """Some rows of a matrix, or one expert."""
    assert q.block_scale is not None and q.amax is not None
    codes = q.codes[index]
    shape = (codes.shape[0], q.shape[-1])
    return QTensor(q.format, codes, q.block_scale[index], q.amax[index], shape, q.block)


def _operands(architecture: int, a: QTensor, b: QTensor, offsets: Tensor | None) -> tuple[Tensor | None, ...]:
    """The first six arguments of ops.gemm for this chip."""
    assert a.block_scale is not None and b.block_scale is not None and a.amax is not None and b.amax is not None
    if architecture < 100:
        return block_scaled(a), None, a.amax, block_scaled(b), None, b.amax
    a_tiles = ops.swizzle(a.block_scale.view(torch.uint8), offsets)
    return a.codes, a_tiles, a.amax, b.codes, layout.swizzle(b.block_scale.view(torch.uint8)), b.amax


def _random(rows: int, k: int, seed: int) -> Tensor:
    """BF16 rows whose sizes differ by powers of two, made on the device."""
    generator = torch.Generator(_DEVICE).manual_seed(seed)
    size_M1 = torch.exp2(torch.randint(-4, 5, (rows, 1), generator=generator, device=_DEVICE).bfloat16())
    return torch.randn(rows, k, generator=generator, device=_DEVICE, dtype=torch.bfloat16) * size_M1
