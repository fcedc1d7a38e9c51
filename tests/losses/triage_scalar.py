"""TRIAGE once more, token by token in plain Python floats, written from docs/triage.md alone."""

from __future__ import annotations

import math

from minite.config.schema import CorrectionConfig


def triage_response(config: CorrectionConfig, gaps: list[float], advantages: list[float]) -> list[tuple[str, float]]:
    """(region, weight) of each loss token of one response. config.calm must be a number."""
    calm = config.calm
    regions = []
    for d, a in zip(gaps, advantages, strict=True):
        if not math.isfinite(d):
            regions.append("broken")
        elif abs(d) <= calm or a == 0:
            regions.append("clear")
        elif (d > 0) != (a > 0):
            regions.append("narrowing")
        elif abs(d) > (config.limit_negative if a < 0 else config.limit_positive):
            regions.append("tail")
        else:
            regions.append("widening")

    for start in range(0, len(gaps), config.window):
        window = range(start, min(start + config.window, len(gaps)))
        risks = [
            max(abs(gaps[i]) - calm, 0.0)
            for i in window
            if math.isfinite(gaps[i]) and gaps[i] * math.copysign(1.0, advantages[i]) > 0 and advantages[i] != 0
        ]
        if risks and sum(risks) / len(risks) > config.segment_risk:
            for i in window:
                if regions[i] == "widening":
                    regions[i] = "tail"

    if regions.count("tail") > config.response_tail_frac * len(regions):
        regions = ["tail" if region == "widening" else region for region in regions]

    return [(region, _weight(config, region, d)) for region, d in zip(regions, gaps, strict=True)]


def _weight(config: CorrectionConfig, region: str, d: float) -> float:
    if region in ("tail", "broken"):
        return 0.0
    if region == "widening":
        return (config.calm / abs(d)) ** config.power
    if region == "narrowing" and config.narrowing == "truncate":
        return min(max(math.exp(min(d, 700.0)), config.ratio_low), config.ratio_high)
    return 1.0
