"""Where in a batch the log-prob gap d = learner - sampler [nats] sits: by position, probability, entropy, response.

Everything is over loss tokens whose gap is finite; the others are counted by ``summary.nonfinite``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from minite.diagnostics.gap import gap_summary
from minite.types import GapSummary, RolloutBatch

# Lower edges of the bins; the last has no upper edge.
PROBABILITIES = (0.0, 0.01, 0.1, 0.5, 0.9, 0.99)
ENTROPIES = (0.0, 0.01, 0.1, 0.5, 1.0, 2.0)  # [nats]
POSITIONS = (0, *(2**i for i in range(24)))  # doubling: the first tokens one by one
TAIL = 100  # one in so many gaps is the negative tail


@dataclass(frozen=True)
class Bin:
    """The gaps of some tokens. [nats]"""

    label: str
    start: float  # lower edge
    tokens: int
    abs_mean: float
    mean: float
    lowest: float  # the end of the negative tail
    abs_max: float


@dataclass(frozen=True)
class Breakdown:
    """The gap of one batch as a whole and in parts. [nats]"""

    summary: GapSummary
    k1: float  # estimate of KL(sampler to learner): mean of -d
    k3: float  # the same, of mean exp(d) - 1 - d: never negative, less noise
    tail_mean: float  # mean of the lowest hundredth of the gaps, at least one
    parts: dict[str, tuple[Bin, ...]]  # "position", "probability", "entropy", "response"

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def breakdown(batch: RolloutBatch, entropy_T: Tensor) -> Breakdown:
    """Take a batch apart that has old_logprob_T. entropy_T float [T]: the learner's, of each token's distribution.

    k1 and k3 are the estimators of J. Schulman, "Approximating KL Divergence" (2020), with r = exp(d) and tokens that
    the sampler drew. "response": one bin for each response that has a finite gap, by its index in the batch.
    """
    assert batch.old_logprob_T is not None
    mask_T, sequence_T = batch.loss_mask_T, batch.sequence_T
    summary = gap_summary(batch.old_logprob_T, batch.sampler_logprob_T, batch.advantage_S[sequence_T], mask_T)
    gap_T = batch.old_logprob_T - batch.sampler_logprob_T
    kept_N = (mask_T & gap_T.isfinite()).nonzero().squeeze(-1)
    gap_N = gap_T[kept_N].double()
    lowest = gap_N.sort().values[: -(-len(gap_N) // TAIL)]
    position_T = mask_T.cumsum(0) - 1
    start_S = torch.nn.functional.pad(mask_T.cumsum(0), (1, 0))[batch.cu_seqlens_S1[:-1]]
    response_N = sequence_T[kept_N]
    parts = {
        "position": _by_edges(gap_N, (position_T - start_S[sequence_T])[kept_N], POSITIONS, whole=True),
        "probability": _by_edges(gap_N, batch.sampler_logprob_T[kept_N].exp(), PROBABILITIES),
        "entropy": _by_edges(gap_N, entropy_T[kept_N], ENTROPIES),
        "response": tuple(_bin(str(i), i, gap_N[response_N == i]) for i in response_N.unique().tolist()),
    }
    return Breakdown(
        summary,
        k1=_mean(-gap_N),
        k3=_mean(torch.expm1(gap_N) - gap_N),
        tail_mean=_mean(lowest),
        parts=parts,
    )


def _by_edges(gap_N: Tensor, value_N: Tensor, edges: Sequence[float], whole: bool = False) -> tuple[Bin, ...]:
    """One bin for each stretch between edges that has a token. ``whole``: values are whole numbers."""
    index_N = torch.bucketize(value_N.double(), torch.tensor(edges, dtype=torch.float64), right=True) - 1
    bins = []
    for i in index_N.unique().tolist():
        low, high = edges[i], edges[i + 1] if i + 1 < len(edges) else math.inf
        if whole:
            label = f"{low}" if high == low + 1 else f"{low} to {high - 1}"
        else:
            label = f"from {low:g}" if high == math.inf else f"{low:g} to {high:g}"
        bins.append(_bin(label, low, gap_N[index_N == i]))
    return tuple(bins)


def _bin(label: str, start: float, gap_n: Tensor) -> Bin:
    lowest, abs_max = float(gap_n.min()), float(gap_n.abs().max())
    return Bin(label, start, len(gap_n), _mean(gap_n.abs()), _mean(gap_n), lowest, abs_max)


def _mean(x_N: Tensor) -> float:
    return float(x_N.mean()) if len(x_N) else 0.0
