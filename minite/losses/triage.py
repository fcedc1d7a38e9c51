"""TRIAGE: weights that depend on whether an update would widen the log-prob gap. The rule is docs/triage.md.

All of it runs once per global batch, on the loss tokens, before any split into microbatches or ranks.
Shape letters: N loss tokens, R responses, W windows.
"""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor

from minite.config.schema import CorrectionConfig
from minite.losses.tokens import LossTokens
from minite.losses.triage_metrics import region_metrics
from minite.losses.triage_state import TriageState


class Region(IntEnum):
    """What TRIAGE makes of a token."""

    CLEAR = 0  # abs(gap) <= calm, or no push at all (advantage 0)
    NARROWING = 1  # the update makes the gap smaller
    WIDENING = 2  # the update makes the gap larger
    TAIL = 3  # widening, and past a limit by itself, by its window or by its response
    BROKEN = 4  # the gap is not finite


def triage(config: CorrectionConfig, tokens: LossTokens, state: TriageState | None) -> tuple[Tensor, dict[str, float]]:
    """Weigh every loss token by its region.

    Args: tokens of the whole global batch; state holds the running calm (``calm: auto`` only, else it may be None).
    Returns: weight float64 [N] and the metrics that docs/metrics.md lists under triage/.
    Raises: ValueError for ``calm: auto`` without a state.
    """
    calm = _calm(config, tokens, state)
    by_token_N = token_regions(config, tokens, calm)
    by_window_N = _escalate(by_token_N, risky_windows(config, tokens, calm))
    region_N = _escalate(by_window_N, risky_responses(config, tokens, by_window_N))
    weight_N = region_weights(config, tokens, region_N, calm)

    total = max(tokens.num_tokens, 1)
    metrics = region_metrics([r.name.lower() for r in Region], region_N, weight_N, tokens)
    metrics["triage/calm"] = calm
    metrics["triage/window_frac"] = int((by_window_N != by_token_N).sum()) / total
    metrics["triage/response_frac"] = int((region_N != by_window_N).sum()) / total
    return weight_N, metrics


def token_regions(config: CorrectionConfig, tokens: LossTokens, calm: float) -> Tensor:
    """The region of each token taken by itself. int64 [N]."""
    size_N = tokens.gap_N.abs()
    push_N = push_on_gap(tokens)
    limit_N = torch.where(tokens.advantage_N < 0, config.limit_negative, config.limit_positive)
    widening_N = torch.where(size_N > limit_N, int(Region.TAIL), int(Region.WIDENING))
    moved_N = torch.where(push_N > 0, widening_N, int(Region.NARROWING))
    region_N = torch.where((size_N > calm) & (push_N != 0), moved_N, int(Region.CLEAR))
    return torch.where(tokens.finite_N, region_N, int(Region.BROKEN))


def push_on_gap(tokens: LossTokens) -> Tensor:
    """d * sign(A), as a sign: +1 the update widens the gap, -1 narrows it, 0 neither or not finite. float64 [N]."""
    return torch.where(tokens.finite_N, tokens.gap_N, 0.0).sign() * tokens.advantage_N.sign()


def risky_windows(config: CorrectionConfig, tokens: LossTokens, calm: float) -> Tensor:
    """Whether the token's window is one of high local risk. bool [N].

    A response is cut into windows of ``window`` loss tokens from its first one; the last may be shorter. The risk of
    a window is the mean of max(abs(d) - calm, 0) over its tokens with d * sign(A) > 0, clear ones (which add 0) and
    tail ones included. [nats]
    """
    widens_N = push_on_gap(tokens) > 0
    window_N = (tokens.position_N % config.window == 0).cumsum(0) - 1
    num_windows = int(window_N[-1]) + 1 if tokens.num_tokens else 0
    excess_N = torch.where(widens_N, tokens.gap_N.abs() - calm, 0.0).clamp(min=0.0)
    # index_add on a CPU adds a window's tokens in their order, whatever else the batch holds.
    zeros_W = torch.zeros(num_windows, dtype=torch.float64, device=excess_N.device)
    sum_W = zeros_W.index_add(0, window_N, excess_N)
    count_W = zeros_W.index_add(0, window_N, widens_N.double())
    return (sum_W / count_W.clamp(min=1.0) > config.segment_risk)[window_N]


def risky_responses(config: CorrectionConfig, tokens: LossTokens, region_N: Tensor) -> Tensor:
    """Whether more than ``response_tail_frac`` of the loss tokens of the token's response are tail. bool [N]."""
    num_responses = int(tokens.response_N[-1]) + 1 if tokens.num_tokens else 0
    tail_R = torch.bincount(tokens.response_N[region_N == Region.TAIL], minlength=num_responses)
    return tail_R[tokens.response_N] > config.response_tail_frac * tokens.length_N


def region_weights(config: CorrectionConfig, tokens: LossTokens, region_N: Tensor, calm: float) -> Tensor:
    """The weight each region gives. float64 [N], finite, >= 0."""
    weight_N = torch.ones_like(tokens.gap_N)
    widening_N = region_N == Region.WIDENING
    # Some libraries make a process flush subnormal numbers, where calm 0 over a subnormal gap would be 0 / 0.
    size_N = tokens.gap_N[widening_N].abs().clamp(min=torch.finfo(torch.float64).tiny)
    weight_N[widening_N] = (calm / size_N) ** config.power
    if config.narrowing == "truncate":
        narrowing_N = region_N == Region.NARROWING
        weight_N[narrowing_N] = tokens.gap_N[narrowing_N].exp().clamp(config.ratio_low, config.ratio_high)
    weight_N[(region_N == Region.TAIL) | (region_N == Region.BROKEN)] = 0.0
    return weight_N


def _escalate(region_N: Tensor, where_N: Tensor) -> Tensor:
    return torch.where(where_N & (region_N == Region.WIDENING), int(Region.TAIL), region_N)


def _calm(config: CorrectionConfig, tokens: LossTokens, state: TriageState | None) -> float:
    if not isinstance(config.calm, str):
        return float(config.calm)
    if state is None:
        raise ValueError("correction.calm is auto: triage() needs the run's TriageState, got None")
    return state.observe(tokens.gap_N, config)
