"""Means over few seeds with their intervals. Shared by the scripts of the TRIAGE evidence."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

# Two-sided 95 % quantiles of Student's t by degrees of freedom: with five seeds a bootstrap is too narrow.
T95 = (math.inf, 12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145,
       2.131, 2.120, 2.110, 2.101, 2.093, 2.086)  # fmt: skip


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Mean and half-width of its 95 % interval (Student's t); nan where one value says nothing of the spread."""
    n = len(values)
    mean = statistics.fmean(values)
    if n < 2:
        return mean, math.nan
    return mean, (T95[n - 1] if n <= len(T95) else 1.96) * statistics.stdev(values) / math.sqrt(n)


def words(found: tuple[float, float] | None, sign: str = "", digits: int = 3) -> str:
    """``0.812 +- 0.010``; empty for nothing."""
    return "" if found is None else f"{found[0]:{sign}.{digits}f} +- {found[1]:.{digits}f}"
