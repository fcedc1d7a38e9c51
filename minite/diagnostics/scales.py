"""Axes and numbers of the charts: round ticks, short texts, and fewer points than steps."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

# Groups of steps a curve is cut into before drawing: with up to 4 points each, more than a chart has pixels for.
BUCKETS = 120


def number_text(value: float) -> str:
    """A value in at most about eight characters: 0.01234, 1.2e-09, 33540, not finite."""
    if not math.isfinite(value):
        return "not finite"
    if value == 0:
        return "0"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.0f}"
    return f"{value:.2g}"


def round_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Up to about ``count`` multiples of 1, 2, 2.5 or 5 times a power of ten within low < high."""
    raw = (high - low) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def value_range(values: Sequence[float]) -> tuple[float, float]:
    """The range an axis shows for finite values: a little more than they span, from zero where zero is near."""
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    if low == high:
        pad = abs(low) * 0.1 or 1.0
        return (0.0, pad) if low == 0 else (low - pad, high + pad)
    pad = 0.05 * (high - low)
    from_zero, to_zero = 0 <= low < 0.5 * high, 0.5 * low < high <= 0
    return (0.0 if from_zero else low - pad), (0.0 if to_zero else high + pad)


def drawn_steps(steps: Sequence[int], curves: Sequence[Mapping[int, float]]) -> list[int]:
    """The steps to draw: all of a short run; else first, lowest, highest and last of each curve in every bucket.

    So no spike is lost, which a mean would flatten. Values that are not finite are kept through the lines they break.
    """
    if len(steps) <= 4 * BUCKETS:
        return [step for step in steps if any(step in curve for curve in curves)]
    kept: set[int] = set()
    for bucket in split(steps):
        for curve in curves:
            known = [step for step in bucket if step in curve]
            if known:
                finite = [step for step in known if math.isfinite(curve[step])] or known
                kept |= {known[0], known[-1], min(finite, key=curve.__getitem__), max(finite, key=curve.__getitem__)}
                kept |= set([step for step in known if not math.isfinite(curve[step])][:1])
    return sorted(kept)


def split(steps: Sequence[int]) -> list[Sequence[int]]:
    """BUCKETS runs of neighbouring steps of nearly equal length."""
    edges = [round(i * len(steps) / BUCKETS) for i in range(BUCKETS + 1)]
    return [steps[a:b] for a, b in zip(edges, edges[1:], strict=False) if b > a]
