"""Truncated importance sampling: weight = min(exp(d), C)."""

from __future__ import annotations

from torch import Tensor

from minite.config.schema import CorrectionConfig
from minite.losses.tokens import LossTokens
from minite.losses.triage_state import TriageState


def tis(config: CorrectionConfig, tokens: LossTokens, state: TriageState | None) -> tuple[Tensor, dict[str, float]]:
    """The importance ratio learner / sampler, cut off above at ``ratio_high``; below it is left as it is.

    Yao et al., "Your efficient RL framework secretly brings you off-policy RL training" (2025): min(ratio, C). slime
    ships the same as ``vanilla_tis_function``, whose lower bound is 0 by default.

    Returns: weight float64 [N] (nan where the gap is nan: correct() drops those) and metrics.
    """
    ratio_N = tokens.gap_N.exp()
    clipped = int((ratio_N > config.ratio_high).sum())
    return ratio_N.clamp(max=config.ratio_high), {"tis/truncated_frac": clipped / max(tokens.num_tokens, 1)}
