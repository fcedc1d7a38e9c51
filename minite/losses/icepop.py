"""IcePop: weight = exp(d) inside an interval, 0 outside."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.config.schema import CorrectionConfig
from minite.losses.tokens import LossTokens
from minite.losses.triage_state import TriageState


def icepop(config: CorrectionConfig, tokens: LossTokens, state: TriageState | None) -> tuple[Tensor, dict[str, float]]:
    """The importance ratio k = learner / sampler where it lies in [ratio_low, ratio_high], else 0.

    Ring-1T report (arXiv 2510.18855), M(k; alpha, beta) with alpha = ratio_low and beta = ratio_high, both ends kept;
    the same form is equation 1 of INTELLECT-3 (arXiv 2512.16144). The ratio is that of the policy that sampled, not of
    the policy being trained, so the weight is a constant. slime ships it as ``icepop_function``.

    Returns: weight float64 [N] and metrics.
    """
    ratio_N = tokens.gap_N.exp()
    kept_N = (ratio_N >= config.ratio_low) & (ratio_N <= config.ratio_high)
    masked = int((~kept_N & tokens.finite_N).sum())
    return torch.where(kept_N, ratio_N, 0.0), {"icepop/masked_frac": masked / max(tokens.num_tokens, 1)}
