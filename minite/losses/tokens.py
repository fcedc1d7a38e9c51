"""The loss tokens of a batch, as every correction sees them: prompts, padding and masked tokens are gone.

Shape letters: T tokens of the packed batch, N loss tokens among them, R responses that own at least one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(frozen=True)
class LossTokens:
    """Per loss token; responses lie end to end, each in the order of its tokens."""

    gap_N: Tensor  # float64, old_logprob - sampler_logprob [nats]; may hold inf and nan
    advantage_N: Tensor  # float64
    response_N: Tensor  # int64, 0 .. R - 1
    position_N: Tensor  # int64, 0 for the first loss token of its response
    length_N: Tensor  # int64, loss tokens in its response

    @property
    def num_tokens(self) -> int:
        return int(self.gap_N.numel())

    @cached_property
    def finite_N(self) -> Tensor:
        return self.gap_N.isfinite()


def loss_tokens(
    old_logprob_T: Tensor, sampler_logprob_T: Tensor, advantage_T: Tensor, mask_T: Tensor, sequence_T: Tensor
) -> LossTokens:
    """Pick the loss tokens out of a packed batch.

    Args: log-probs float [T] [nats]; advantage_T float [T]; mask_T bool [T]; sequence_T int64 [T], the response that
    owns each token, each response in one run. Raises: ValueError where a shape differs, a response comes in two runs
    or an advantage of a loss token is not finite.
    """
    for name, value in (
        ("old_logprob_T", old_logprob_T), ("sampler_logprob_T", sampler_logprob_T), ("advantage_T", advantage_T),
        ("sequence_T", sequence_T),
    ):  # fmt: skip
        if value.shape != mask_T.shape or value.dim() != 1:
            raise ValueError(f"{name} has shape {tuple(value.shape)}, expected 1-D like mask_T {tuple(mask_T.shape)}")
    index_N = mask_T.nonzero().squeeze(-1)  # a mask is turned into this at every use of it
    advantage_N = advantage_T.detach()[index_N].double()
    if not bool(advantage_N.isfinite().all()):
        raise ValueError(
            "advantage_T holds inf or nan on loss tokens, expected finite numbers, as group_advantage gives"
        )
    ids_R, response_N, count_R = torch.unique_consecutive(sequence_T[index_N], return_inverse=True, return_counts=True)
    if torch.unique(ids_R).numel() != ids_R.numel():
        raise ValueError("sequence_T names a response in two separate runs: the tokens of a response must lie together")
    start_R = count_R.cumsum(0) - count_R
    rank_N = torch.arange(advantage_N.numel(), device=mask_T.device)
    return LossTokens(
        gap_N=old_logprob_T.detach()[index_N].double() - sampler_logprob_T.detach()[index_N].double(),
        advantage_N=advantage_N,
        response_N=response_N,
        position_N=rank_N - start_R[response_N],
        length_N=count_R[response_N],
    )
