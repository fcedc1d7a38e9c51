"""The least time that one learner update can take on a GPU, from shapes alone: `minite bench learner`.

Every part takes max(flops / peak, bytes / bandwidth): nothing is measured, overlapped or communicated, so real runs are
slower, by how much only a GPU says. A weight is read once per GEMM, a tensor once per kernel; one GPU does it all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from minite.config.operands import OPERANDS
from minite.config.plan import PlanEntry
from minite.config.schema import ModelConfig
from minite.errors import UserError
from minite.models import get_model


@dataclass(frozen=True)
class Gpu:
    """Peaks of dense products [TFLOP/s] and of memory [TB/s], as NVIDIA states them for its HGX boards."""

    bf16: float
    fp4: float | None  # None: no FP4 tensor cores; NVFP4 is then multiplied as BF16
    bandwidth: float


GPUS = {"h200": Gpu(989, None, 4.8), "b200": Gpu(2250, 9000, 8.0), "b300": Gpu(2250, 13125, 8.0)}
_OPTIMIZER_BYTES = 4 * 4 + 3 * 4 + 2  # reads master, gradient and two moments, writes three of them and the BF16 weight


@dataclass(frozen=True)
class Part:
    """Work of one kind in one update, over all layers. [FLOP], [byte], [ms]"""

    name: str
    passes: str  # "forward" | "backward" | "step": forward is done again for log-probs
    flops: float
    bytes: float
    ms: float


def update(model: ModelConfig, entries: Iterable[PlanEntry], tokens: int, sequence: int, gpu: Gpu) -> list[Part]:
    """The parts of an update of ``tokens`` tokens in sequences of ``sequence``."""
    groups: dict[str, list[PlanEntry]] = defaultdict(list)
    for entry in entries:
        groups[entry.group or entry.name].append(entry)
    family, sums = get_model(model.kind), dict[tuple[str, str], list[float]]()
    for members in groups.values():
        first, n = members[0], sum(e.n for e in members)
        rows = tokens * family.token_share(model, first.name)
        for passes, what, flops, size, fp4 in _gemms(first, rows, n):
            peak = gpu.fp4 if fp4 and gpu.fp4 is not None else gpu.bf16
            _add(sums, (f"{what} {_kind(members)}", passes), flops, size, peak)
    _others(sums, model, groups, tokens, sequence, gpu)
    return [_part(name, passes, values, gpu) for (name, passes), values in sums.items()]


def table(model: ModelConfig, entries: Iterable[PlanEntry], tokens: int, sequence: int, gpu_name: str) -> str:
    """The parts under the plan, then tokens/s of the plan and of BF16, with and without the log-prob pass."""
    gpu = _gpu(gpu_name)
    entries = list(entries)
    plain = [replace(e, weight="bf16", input="bf16", dgrad="bf16", wgrad="bf16") for e in entries]
    ours, bf16 = (update(model, e, tokens, sequence, gpu) for e in (entries, plain))
    width = max(len(p.name) for p in ours)
    lines = [
        f"{tokens} tokens in sequences of {sequence} on one {gpu_name}: {gpu.bf16:g} TFLOP/s BF16, "
        f"{gpu.fp4 or gpu.bf16:g} for NVFP4, {gpu.bandwidth:g} TB/s; a bound, nothing was measured",
        f"{'part':{width}} {'pass':8} {'TFLOP':>9} {'GB':>9} {'ms':>9}",
    ]
    lines += [f"{p.name:{width}} {p.passes:8} {p.flops / 1e12:9.1f} {p.bytes / 1e9:9.2f} {p.ms:9.2f}" for p in ours]
    for what, forwards in (("update", 1), ("update and log-probs", 2)):
        times = [sum(p.ms * (forwards if p.passes == "forward" else 1) for p in parts) for parts in (ours, bf16)]
        speeds = [tokens / ms * 1e3 for ms in times]
        lines.append(
            f"{what}: plan {times[0]:.1f} ms, {speeds[0]:,.0f} tokens/s; BF16 {times[1]:.1f} ms, "
            f"{speeds[1]:,.0f} tokens/s; {times[1] / times[0]:.2f} times"
        )
    return "\n".join(lines)


def _gemms(e: PlanEntry, rows: float, n: int) -> Iterable[tuple[str, str, float, float, bool]]:
    """(pass, what, FLOP, bytes, whether on FP4 tensor cores) of the products of one linear or fusion group."""
    flops = 2 * rows * n * e.k
    weight, x, result = (OPERANDS[e.weight].bits / 8 * n * e.k, OPERANDS[e.input].bits / 8 * rows * e.k, 2 * rows * n)
    fp4 = e.weight.startswith("nvfp4") and e.input.startswith("nvfp4")
    yield "forward", "fprop", flops, weight + x + result, fp4
    if OPERANDS[e.input].module is not None:
        yield "forward", "quantize input of", 0, 2 * rows * e.k + x, False
    if OPERANDS[e.weight].module is not None:
        yield "step", "quantize weight of", 0, 2 * 2 * n * e.k + weight, False  # once for its amax
    yield from _backward(e, rows, n)


def _backward(e: PlanEntry, rows: float, n: int) -> Iterable[tuple[str, str, float, float, bool]]:
    """As `_gemms`. NVFP4 operands are made in the backward, see layers/nvfp4_gradients.py; the weight's once a pass."""
    flops, gradient, x, weight = 2 * rows * n * e.k, rows * n, rows * e.k, n * e.k  # the last three: elements
    code = OPERANDS["nvfp4_1d"].bits / 8
    fp4 = e.dgrad == "nvfp4"
    yield "backward", "dgrad", flops, (code if fp4 else 2) * (gradient + weight) + 2 * x, fp4
    if fp4:  # the weight has one outer scale, so it is read for its amax first; a row of the gradient is at hand
        yield "backward", "quantize for dgrad of", 0, (2 + code) * gradient + (2 + 2 + code) * weight, False
    fp4 = e.wgrad == "nvfp4"
    yield "backward", "wgrad", flops, 4 * weight + (code if fp4 else 2) * (gradient + x), fp4
    if fp4:  # along tokens: both are read for their outer scales first
        yield "backward", "quantize for wgrad of", 0, (2 + 2 + code) * (gradient + x), False


def _others(
    sums: dict[tuple[str, str], list[float]],
    model: ModelConfig,
    groups: dict[str, list[PlanEntry]],
    tokens: int,
    sequence: int,
    gpu: Gpu,
) -> None:
    """Attention, causal: half of QK^T and PV, backward two and a half times that; and the optimizer."""
    heads, kv_heads, layers = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim, model.num_layers
    flops = 2 * tokens * sequence * heads * layers
    size = 2 * tokens * (2 * heads + 2 * kv_heads) * layers
    _add(sums, ("attention", "forward"), flops, size, gpu.bf16)
    _add(sums, ("attention", "backward"), 2.5 * flops, 2 * size, gpu.bf16)
    parameters = sum(e.n * e.k for members in groups.values() for e in members)
    _add(sums, ("optimizer", "step"), 0, _OPTIMIZER_BYTES * parameters, gpu.bf16)


def _add(
    sums: dict[tuple[str, str], list[float]], key: tuple[str, str], flops: float, size: float, peak: float
) -> None:
    total = sums.setdefault(key, [0.0, 0.0, peak])
    total[0] += flops
    total[1] += size


def _part(name: str, passes: str, values: list[float], gpu: Gpu) -> Part:
    flops, size, peak = values
    return Part(name, passes, flops, size, 1e3 * max(flops / peak / 1e12, size / gpu.bandwidth / 1e12))


def _kind(members: list[PlanEntry]) -> str:
    """ "self_attn.q+k+v_proj": the same in every layer and for every expert, with the operands that it has here."""
    path = [p for p in members[0].name.removeprefix("model.layers.").split(".") if not p.isdigit()]
    leaves = "+".join(e.name.rpartition(".")[2].removesuffix("_proj") for e in members)
    first = members[0]
    operands = "" if first.weight == first.input == "bf16" else f" ({first.weight} x {first.input})"
    return ".".join([*path[:-1], leaves]) + operands


def _gpu(name: str) -> Gpu:
    if name not in GPUS:
        raise UserError(f"bench learner: GPU {name!r} is unknown; expected one of {', '.join(GPUS)}")
    return GPUS[name]
