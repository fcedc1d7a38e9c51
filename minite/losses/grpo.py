"""The GRPO loss: clipped policy ratio, token mean over the global batch, optional KL to a reference and entropy bonus.

Shape letters: T tokens of a packed microbatch, N loss tokens among them. Tokens are picked out by index, never
multiplied by a mask: whatever lies on other tokens, NaN included, cannot reach the loss or a gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from minite.config.schema import AlgoConfig
from minite.types import LossOutput

# Upper bound of a log ratio before exp [nats]: keeps exp finite. A ratio of 5e8 is far outside any trust region; a
# token past it has no gradient.
MAX_LOG_RATIO = 20.0


class _Policy(NamedTuple):
    term_N: Tensor  # per-token loss, before the correction weight
    clipped_N: Tensor  # bool: the clip took the gradient away
    dual_clipped_N: Tensor  # bool: the dual clip did
    k3_N: Tensor  # KL(old || new) by token, no gradient


def grpo_loss(
    logprob_T: Tensor,
    old_logprob_T: Tensor,
    advantage_T: Tensor,
    mask_T: Tensor,
    weight_T: Tensor | None,
    denominator: float,
    config: AlgoConfig,
    ref_logprob_T: Tensor | None = None,
    entropy_T: Tensor | None = None,
) -> LossOutput:
    """Loss of one microbatch, already divided by the token count of the global batch.

    With r = exp(logprob - old_logprob), A the advantage and w the correction weight, a loss token costs
        w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high))
    (PPO, arXiv 1707.06347; the two bounds of DAPO, arXiv 2503.14476), for A < 0 at most -A * dual_clip (arXiv
    1912.09729), + kl_coef * k3 with k3 = exp(x) - x - 1, x = ref_logprob - logprob, an estimate of KL(policy || ref)
    (Schulman, "Approximating KL divergence", 2020), - entropy_coef * entropy. Weights scale the policy term only.
    A token of weight 0 leaves that term altogether; it stays in KL and entropy unless its own log-prob is not finite.
    A kept token whose log-prob is nan makes the loss nan, on purpose: that is a broken learner, not a gap.

    Args: log-probs float [T] [nats], logprob_T carries the gradient and everything else is a constant but entropy_T;
    mask_T bool [T]; weight_T float [T] or None (all ones); denominator = loss tokens of the global batch, dropped ones
    included (0 is read as 1: such a batch has loss 0); ref_logprob_T, entropy_T [T], needed where their coefficient
    is not 0. Computed in float64 and returned as a float64 scalar.
    Returns: LossOutput whose metrics are sums, to be added over microbatches and ranks, then given to mean_metrics.
    Raises: ValueError for shapes that differ or a missing ref_logprob_T or entropy_T.
    """
    _check(mask_T, config, logprob_T=logprob_T, old_logprob_T=old_logprob_T, advantage_T=advantage_T,
           weight_T=weight_T, ref_logprob_T=ref_logprob_T, entropy_T=entropy_T)  # fmt: skip
    kept_T = mask_T if weight_T is None else mask_T & (weight_T != 0)
    policy = _policy(logprob_T[kept_T], old_logprob_T[kept_T], advantage_T[kept_T], config)
    term_N = policy.term_N if weight_T is None else policy.term_N * weight_T.detach()[kept_T].double()
    policy_sum = term_N.sum()
    total = policy_sum
    sums = {
        "tokens": mask_T.sum(),
        "kept": kept_T.sum(),
        "policy": policy_sum,
        "clipped": policy.clipped_N.sum(),
        "dual_clipped": policy.dual_clipped_N.sum(),
        "policy_kl": policy.k3_N.sum(),
    }
    sound_T = mask_T & (kept_T | logprob_T.isfinite())
    sums["sound"] = sound_T.sum()
    if ref_logprob_T is not None:
        sums["ref_kl"] = _k3(ref_logprob_T.detach()[sound_T].double() - logprob_T[sound_T].double()).sum()
        total = total + config.kl_coef * sums["ref_kl"]
    if entropy_T is not None:
        sums["entropy"] = entropy_T[sound_T].double().sum()
        total = total - config.entropy_coef * sums["entropy"]
    # One transfer for all metrics: every .item() would stall a GPU.
    values = torch.stack([value.detach().double() for value in sums.values()]).tolist()
    return LossOutput(total / max(denominator, 1), dict(zip(sums, values, strict=True)))


def mean_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """Turn summed metrics of a global batch into the keys of docs/metrics.md. Empty batches give zeros."""
    tokens, kept, sound = (max(sums[key], 1.0) for key in ("tokens", "kept", "sound"))
    means = {
        "loss/policy": sums["policy"] / tokens,
        "loss/clip_frac": sums["clipped"] / kept,
        "loss/dual_clip_frac": sums["dual_clipped"] / kept,
        "loss/policy_kl": sums["policy_kl"] / kept,
    }
    if "ref_kl" in sums:
        means["loss/ref_kl"] = sums["ref_kl"] / sound
    if "entropy" in sums:
        means["entropy/mean"] = sums["entropy"] / sound
    return means


def _policy(logprob_N: Tensor, old_logprob_N: Tensor, advantage_N: Tensor, config: AlgoConfig) -> _Policy:
    log_ratio_N = logprob_N.double() - old_logprob_N.detach().double()
    cost_N = -advantage_N.detach().double()
    # Clamped before exp: behind an infinite exp the unused branch of maximum would give 0 * inf = nan as gradient.
    ratio_N = log_ratio_N.clamp(max=MAX_LOG_RATIO).exp()
    low, high = 1 - config.clip_low, 1 + config.clip_high
    term_N = torch.maximum(cost_N * ratio_N, cost_N * ratio_N.clamp(low, high))
    clipped_N = torch.where(cost_N < 0, ratio_N > high, ratio_N < low) & (cost_N != 0)
    dual_clipped_N = torch.zeros_like(clipped_N)
    if config.dual_clip is not None:
        dual_clipped_N = (cost_N > 0) & (ratio_N > config.dual_clip)
        term_N = torch.where(dual_clipped_N, cost_N * config.dual_clip, term_N)
    return _Policy(term_N, clipped_N, dual_clipped_N, _k3(log_ratio_N.detach()))


def _k3(log_ratio_N: Tensor) -> Tensor:
    log_ratio_N = log_ratio_N.clamp(max=MAX_LOG_RATIO)
    return log_ratio_N.expm1() - log_ratio_N


def _check(mask_T: Tensor, config: AlgoConfig, **tensors: Tensor | None) -> None:
    for name, value in tensors.items():
        if value is not None and (value.dim() != 1 or value.shape != mask_T.shape):
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected 1-D like mask_T {tuple(mask_T.shape)}")
    if config.kl_coef and tensors["ref_logprob_T"] is None:
        raise ValueError(f"algo.kl_coef is {config.kl_coef}: grpo_loss needs ref_logprob_T")
    if config.entropy_coef and tensors["entropy_T"] is None:
        raise ValueError(f"algo.entropy_coef is {config.entropy_coef}: grpo_loss needs entropy_T")
