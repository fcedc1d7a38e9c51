"""Two ways into slime's loss. Both multiply by weights that hooks.postprocess has fixed on the whole rollout.

``correct_loss`` (--custom-tis-function-path) keeps slime's own policy loss, whatever the estimator; minite launch uses
it. ``grpo`` (--loss-type custom_loss) is the loss of `minite train`, to compare the two frameworks on equal terms.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from minite.errors import UserError
from minite.losses.grpo import grpo_loss
from slime_plugin.context import context
from slime_plugin.rollout import WeightBook

BOOK = WeightBook()  # of this process


def correct_loss(
    args: Any,
    *,
    pg_loss: Tensor,
    train_log_probs: Sequence[Tensor],
    rollout_log_probs: Sequence[Tensor],
    loss_masks: Sequence[Tensor],
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
) -> tuple[Tensor, Sequence[Tensor], dict[str, Tensor]]:
    """slime's TIS hook: the policy term of every token times its weight; masks, and so denominators, stay.

    Returns: (pg_loss [tokens], the masks, per-token metrics that slime averages over the loss tokens).
    """
    weight_T = BOOK.read(rollout_log_probs)
    # A dropped token is cut out, not multiplied: 0 * inf would be nan.
    weighed_T = torch.where(weight_T == 0, 0.0, pg_loss * weight_T)
    return weighed_T, loss_masks, {"correction_weight": weight_T, "correction_dropped": (weight_T == 0).float()}


def grpo(
    args: Any, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """slime's custom loss: minite.losses.grpo on slime's logits [1, T, V], summed over the loss tokens.

    slime divides by the tokens of the global batch, for which --calculate-per-token-loss must be set.
    """
    if not args.calculate_per_token_loss:
        raise UserError("slime_plugin.loss.grpo is a mean over tokens: start slime with --calculate-per-token-loss")
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy, get_rollout_top_p_logprob_kwargs

    lists = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
        with_entropy=True,
        **get_rollout_top_p_logprob_kwargs(args, batch),
    )[1]
    algo = context(args).config.algo
    out = grpo_loss(
        torch.cat(lists["log_probs"]),
        torch.cat(batch["log_probs"]),
        torch.cat(batch["advantages"]),
        torch.cat(batch["loss_masks"]).bool(),
        BOOK.read(batch["rollout_log_probs"]),
        1.0,
        algo,
        torch.cat(batch["ref_log_probs"]) if algo.kl_coef else None,
        torch.cat(lists["entropy"]) if algo.entropy_coef else None,
    )
    names = {"policy": "pg_loss", "clipped": "pg_clipfrac", "policy_kl": "ppo_kl", "ref_kl": "kl_loss"}
    sums = {ours: out.metrics[theirs] for theirs, ours in names.items() if theirs in out.metrics}
    loss = out.loss.float() + 0 * logits.sum()  # every rank has a gradient, also one without loss tokens
    return loss, {"loss": loss.detach(), **{key: loss.new_tensor(value) for key, value in sums.items()}}
