"""What TRIAGE reports of its regions."""

from __future__ import annotations

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
    metrics: dict[str, float] = {}
    pull_N = tokens.advantage_N.abs() * weight_N
    total_pull = float(pull_N.sum())
    quarter_N = QUARTERS * tokens.position_N // tokens.length_N
    quarter_sizes = [int((quarter_N == q).sum()) for q in range(QUARTERS)]
    for number, name in enumerate(names):
        in_region_N = region_N == number
        count = int(in_region_N.sum())
        metrics[f"triage/{name}_frac"] = count / max(tokens.num_tokens, 1)
        metrics[f"triage/{name}_grad_share"] = float(pull_N[in_region_N].sum()) / total_pull if total_pull else 0.0
        if count:
            metrics[f"triage/{name}_weight"] = float(weight_N[in_region_N].sum()) / count
        for q, size in enumerate(quarter_sizes):
            if size:
                metrics[f"triage/{name}_frac_q{q + 1}"] = int((in_region_N & (quarter_N == q)).sum()) / size
    return metrics
