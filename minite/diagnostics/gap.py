"""The log-prob gap d = old_logprob - sampler_logprob [nats] of a batch, in numbers. Reading help: docs/alignment.md.

Shape letters: T tokens of the packed batch, N loss tokens whose gap is finite.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from minite.types import GapSummary

# Quantiles of GapSummary, in thousandths: integers keep the ranks exact.
PER_MILLE = {"p001": 1, "p01": 10, "p50": 500, "p99": 990, "p999": 999}


def gap_summary(old_logprob_T: Tensor, sampler_logprob_T: Tensor, advantage_T: Tensor, mask_T: Tensor) -> GapSummary:
    """Summarize the gap over the loss tokens of a batch; everything but ``nonfinite`` over the finite gaps among them.

    A quantile is an observed gap: the smallest with at least that share of the gaps at or below it (by sorting).
    ess = (sum r)^2 / (N sum r^2), r = exp(d): Kong's effective sample size (1992) as a fraction of N, 1 = no mismatch.
    corr_advantage is Pearson's, 0 where either side does not vary. A batch without a finite gap gives zeros.

    Args: log-probs float [T] [nats], advantage_T float [T], mask_T bool [T]. Computed in float64.
    Returns: GapSummary; ``tokens`` counts the loss tokens, those of a gap that is not finite included.
    """
    index_M = mask_T.nonzero().squeeze(-1)  # a mask is turned into this at every use of it
    gap_M = (old_logprob_T.detach()[index_M].double() - sampler_logprob_T.detach()[index_M].double()).cpu()
    advantage_M = advantage_T.detach()[index_M].double().cpu()
    tokens = gap_M.numel()
    finite_M = gap_M.isfinite()
    if not bool(finite_M.all()):
        gap_M, advantage_M = gap_M[finite_M], advantage_M[finite_M]
    count = gap_M.numel()
    if count == 0:
        nothing = dict.fromkeys(("abs_mean", "abs_p99", "abs_max", "mean", *PER_MILLE, "ess", "corr_advantage"), 0.0)
        return GapSummary(tokens=tokens, nonfinite=tokens, **nothing)
    # Everything is summed in the order of the gaps, so that the order of the tokens is not seen.
    order_N = torch.from_numpy(np.argsort(gap_M.numpy()))  # half the time of torch's
    gap_N = gap_M[order_N]
    size_N = gap_N.abs()
    return GapSummary(
        tokens=tokens,
        abs_mean=float(size_N.mean()),
        abs_p99=_quantile(torch.from_numpy(np.sort(size_N.numpy())), 990),
        abs_max=float(size_N.max()),
        mean=float(gap_N.mean()),
        ess=effective_sample_size(gap_N),
        corr_advantage=correlation(gap_N, advantage_M[order_N]),
        nonfinite=tokens - count,
        **{name: _quantile(gap_N, share) for name, share in PER_MILLE.items()},
    )


def _quantile(sorted_N: Tensor, per_mille: int) -> float:
    return float(sorted_N[-(-sorted_N.numel() * per_mille // 1000) - 1])


def gap_metrics(summary: GapSummary) -> dict[str, float]:
    """The summary under the keys of docs/metrics.md."""
    return {
        "gap/abs_mean": summary.abs_mean,
        "gap/abs_p99": summary.abs_p99,
        "gap/abs_max": summary.abs_max,
        "gap/mean": summary.mean,
        "gap/p0.1": summary.p001,
        "gap/p1": summary.p01,
        "gap/p50": summary.p50,
        "gap/p99": summary.p99,
        "gap/p99.9": summary.p999,
        "gap/corr_advantage": summary.corr_advantage,
        "gap/nonfinite": float(summary.nonfinite),
        "ratio/ess": summary.ess,
    }


def effective_sample_size(gap_N: Tensor) -> float:
    """(sum r)^2 / (N sum r^2) with r = exp(gap), in log space so that no gap overflows. In (0, 1]."""
    log_ess = 2 * torch.logsumexp(gap_N, 0) - torch.logsumexp(2 * gap_N, 0) - math.log(gap_N.numel())
    return min(math.exp(float(log_ess)), 1.0)  # rounding alone could pass 1


def correlation(a_N: Tensor, b_N: Tensor) -> float:
    """Pearson correlation, in [-1, 1]; 0 where either does not vary."""
    if bool(a_N.min() == a_N.max()) or bool(b_N.min() == b_N.max()):
        return 0.0
    a_N, b_N = a_N - a_N.mean(), b_N - b_N.mean()
    # Scaled before squaring: gaps of 1e-9 and advantages of 1e6 come in the same batch.
    a_N, b_N = a_N / a_N.abs().max(), b_N / b_N.abs().max()
    value = float((a_N * b_N).sum() / (a_N.square().sum() * b_N.square().sum()).sqrt())
    return min(max(value, -1.0), 1.0)
