"""What is done about the log-prob gap: one weight per token, computed once on the global batch.

The weights are fixed before the batch is split, so neither packing nor parallelism can change them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minite.config.schema import CorrectionConfig
from minite.errors import UserError
from minite.losses.icepop import icepop
from minite.losses.tis import tis
from minite.losses.tokens import LossTokens, loss_tokens
from minite.losses.triage import triage
from minite.losses.triage_state import TriageState

Kind = Callable[[CorrectionConfig, LossTokens, TriageState | None], tuple[Tensor, dict[str, float]]]


def none(config: CorrectionConfig, tokens: LossTokens, state: TriageState | None) -> tuple[Tensor, dict[str, float]]:
    """Every weight 1. Returns: float64 [N] and no metrics."""
    return torch.ones_like(tokens.gap_N), {}


KINDS: dict[str, Kind] = {"none": none, "tis": tis, "icepop": icepop, "triage": triage}


@dataclass(frozen=True)
class CorrectionOutput:
    """Weights for grpo_loss and what to say of them."""

    weight_T: Tensor  # float32 [T], >= 0, constant to autograd; 0 off the mask
    metrics: dict[str, float]  # keys in docs/metrics.md
    dropped_frac: float  # loss tokens of weight 0, as a fraction of all loss tokens
    unhealthy: bool  # dropped_frac > config.max_dropped_frac; config.unhealthy says what the driver then does


def correct(
    config: CorrectionConfig,
    old_logprob_T: Tensor,
    sampler_logprob_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    sequence_T: Tensor,
    state: TriageState | None,
) -> CorrectionOutput:
    """Weigh the tokens of a global batch by their gap d = old_logprob - sampler_logprob [nats].

    Whatever the kind, a token whose gap is not finite is dropped (weight 0). ``renormalize`` scales the weights to
    mean 1 over the loss tokens, which makes the token mean of grpo_loss one over the kept weight.

    Args: [T] in the packed layout of minite.types; log-probs float, advantage_T float, mask_T bool, sequence_T int64;
    state is changed in place by ``calm: auto`` and may be None otherwise.
    Raises: UserError for an unknown kind; ValueError for tensors that do not fit (see loss_tokens).
    """
    if config.kind not in KINDS:
        raise UserError(f"correction.kind: got {config.kind!r}, expected one of {', '.join(KINDS)}")
    tokens = loss_tokens(old_logprob_T, sampler_logprob_T, advantage_T, mask_T, sequence_T)
    weight_N, metrics = KINDS[config.kind](config, tokens, state)
    weight_N = torch.where(tokens.finite_N, weight_N, 0.0)
    if config.renormalize:
        weight_N = _to_mean_one(weight_N)
    total = max(tokens.num_tokens, 1)
    dropped_frac = int((weight_N == 0).sum()) / total
    metrics["correction/dropped_frac"] = dropped_frac
    metrics["correction/broken_frac"] = int((~tokens.finite_N).sum()) / total
    metrics["correction/weight_mean"] = float(weight_N.sum()) / total
    weight_T = torch.zeros(mask_T.shape, dtype=torch.float32, device=mask_T.device)
    weight_T[mask_T] = weight_N.float()
    return CorrectionOutput(weight_T, metrics, dropped_frac, dropped_frac > config.max_dropped_frac)


def _to_mean_one(weight_N: Tensor) -> Tensor:
    # Summed in sorted order: the scale must not depend on the order of the responses.
    kept = float(weight_N.sort().values.sum())
    return weight_N * (weight_N.numel() / kept) if kept else weight_N
