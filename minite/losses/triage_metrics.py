"""What TRIAGE reports of its regions."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

from minite.losses.tokens import LossTokens

QUARTERS = 4


def region_metrics(names: Sequence[str], region_N: Tensor, weight_N: Tensor, tokens: LossTokens) -> dict[str, float]:
    """Token fraction, mean weight, gradient share and fraction by position of every region.

    The gradient share of a region is its part of the sum of abs(A) * weight: the pull it has on the policy, with the
    same gradient norm assumed for every token. Positions are quarters of a response, q1 the first. A key whose value
    would be 0 / 0 (mean weight of an empty region, an empty quarter) is left out.

    Args: names by region number; region_N int64 [N]; weight_N float64 [N].
    """
    regions, total = len(names), max(tokens.num_tokens, 1)
    quarter_N = (QUARTERS * tokens.position_N.double() / tokens.length_N).long()  # exact: the floor of small quotients
    counts = region_N.mul(QUARTERS).add(quarter_N).bincount(minlength=regions * QUARTERS).view(regions, QUARTERS)
    zeros = weight_N.new_zeros(regions)
    weights = zeros.index_add(0, region_N, weight_N).tolist()
    pulls = zeros.index_add(0, region_N, tokens.advantage_N.abs() * weight_N).tolist()
    total_pull, quarter_sizes = math.fsum(pulls), counts.sum(0).tolist()
    metrics: dict[str, float] = {}
    for name, by_quarter, weight, pull in zip(names, counts.tolist(), weights, pulls, strict=True):
        count = sum(by_quarter)
        metrics[f"triage/{name}_frac"] = count / total
        metrics[f"triage/{name}_grad_share"] = pull / total_pull if total_pull else 0.0
        if count:
            metrics[f"triage/{name}_weight"] = weight / count
        for q, size in enumerate(quarter_sizes):
            if size:
                metrics[f"triage/{name}_frac_q{q + 1}"] = by_quarter[q] / size
    return metrics
