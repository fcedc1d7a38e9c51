"""The plan as text: modules that differ only in layer or expert number and are decided alike share one line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from minite.config.operands import OPERANDS
from minite.config.plan import PlanEntry, PrecisionPlan


@dataclass
class _Line:
    entry: PlanEntry  # any one of the modules
    numbers: list[tuple[int, ...]] = field(default_factory=list)


def render(plan: PrecisionPlan) -> str:
    """Header, one line per kind of decision, totals."""
    lines = _collapse(plan.entries)
    weights = sum(e.n * e.k for e in plan.entries)
    macs = sum(_macs(e) for e in plan.entries)
    rows = [("module", "count", "[N, K]", "format", "weight", "input", "dgrad", "wgrad", "weights", "FLOPs", "bytes/w")]
    for line in lines:
        e, count = line.entry, len(line.numbers)
        rows.append(
            (
                ranges(line.entry.name, line.numbers),
                str(count),
                f"[{e.n}, {e.k}]",
                e.format,
                e.weight,
                e.input,
                e.dgrad,
                e.wgrad,
                f"{100 * count * e.n * e.k / weights:.2f}%",
                f"{100 * count * _macs(e) / macs:.2f}%",
                f"{OPERANDS[e.weight].bits / 8:g}",
            )
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    body = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*_header(plan), "", *body, "", *_totals(plan, weights, macs)])


def _header(plan: PrecisionPlan) -> list[str]:
    return [
        f"plan {plan.digest[:16]}  alignment {plan.alignment}  kv_cache {plan.kv_cache}  "
        f"lm_head {plan.lm_head_dtype}  backend {plan.backend}"
    ]


def _totals(plan: PrecisionPlan, weights: int, macs: float) -> list[str]:
    """Stored size and quantized shares. The backward is two GEMMs of the forward's size, each NVFP4 or BF16."""
    quantized = [e for e in plan.entries if e.quantized]
    size = sum(e.n * e.k * OPERANDS[e.weight].bits / 8 for e in plan.entries)
    forward = sum(_macs(e) for e in quantized) / macs
    backward = sum(_macs(e) * [e.dgrad, e.wgrad].count("nvfp4") for e in plan.entries) / macs
    return [
        f"{len(plan)} linears, {_count(weights)} weights: {_count(size)}B stored, {_count(2 * weights)}B as BF16",
        f"quantized: {100 * sum(e.n * e.k for e in quantized) / weights:.1f}% of the weights, {100 * forward:.1f}% of "
        f"the GEMM FLOPs of a forward, {100 * (forward + backward) / 3:.1f}% of those of forward + backward",
    ]


def _count(number: float) -> str:
    """1234567 -> "1.23 M"."""
    for unit, scale in (("G", 1e9), ("M", 1e6)):
        if number >= scale:
            return f"{number / scale:.2f} {unit}"
    return f"{number / 1e3:.2f} k"


def _macs(entry: PlanEntry) -> float:
    """Multiply-adds per token of the forward."""
    return entry.n * entry.k * entry.token_share


def _collapse(entries: Sequence[PlanEntry]) -> list[_Line]:
    lines: dict[tuple[object, ...], _Line] = {}
    for e in entries:
        segments = e.name.split(".")
        numbers = tuple(int(s) for s in segments if s.isdigit())
        shape = ".".join("*" if s.isdigit() else s for s in segments)
        key = (shape, e.n, e.k, e.format, e.weight, e.input, e.dgrad, e.wgrad)
        lines.setdefault(key, _Line(e)).numbers.append(numbers)
    return list(lines.values())


def ranges(name: str, numbers: Sequence[tuple[int, ...]]) -> str:
    """model.layers.[1-46].mlp.experts.[0-127].gate_proj, of one of the names and the numbers in all of them.

    Each number is ranged on its own; only a count tells when rules that name single experts leave holes."""
    axes = iter([_spans(sorted(set(axis))) for axis in zip(*numbers, strict=True)])
    return ".".join(next(axes) if s.isdigit() else s for s in name.split("."))


def _spans(values: Sequence[int]) -> str:
    """[0, 1, 2, 5] -> "[0-2,5]"; one value -> the value."""
    if len(values) == 1:
        return str(values[0])
    spans: list[list[int]] = []
    for value in values:
        if spans and value == spans[-1][1] + 1:
            spans[-1][1] = value
        else:
            spans.append([value, value])
    return "[" + ",".join(str(a) if a == b else f"{a}-{b}" for a, b in spans) + "]"
