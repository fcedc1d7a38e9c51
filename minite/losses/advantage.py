"""Group advantages of GRPO, and which groups carry a signal.

Shape letters: S responses, G groups (prompts).
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite.errors import UserError

# Added to the standard deviation [reward]: rewards that differ by less than this are noise, not signal.
STD_FLOOR = 1e-6


def group_advantage(reward_S: Tensor, group_S: Tensor, normalize_std: bool) -> Tensor:
    """How much better each response did than its group: A = r - mean(r of the group), over the group's spread.

    GRPO (arXiv 2402.03300, section 4.1.2); ``normalize_std=False`` is the variant of Dr. GRPO (arXiv 2503.20783).
    The spread is the sample standard deviation (n - 1) + ``STD_FLOOR``. A group whose rewards are all equal, a group
    of one among them, gets exactly 0.

    Args: reward_S float [S] (finite); group_S int64 [S], equal for responses of one prompt, in any order.
    Returns: float32 [S]. Raises: UserError where a reward is not finite.
    """
    _check_finite(reward_S, group_S)
    reward_S = reward_S.double()
    index_S, count_G = torch.unique(group_S, return_inverse=True, return_counts=True)[1:]
    zeros_G = torch.zeros(count_G.numel(), dtype=torch.float64, device=reward_S.device)
    mean_G = zeros_G.index_add(0, index_S, reward_S) / count_G
    advantage_S = reward_S - mean_G[index_S]
    if normalize_std:
        variance_G = zeros_G.index_add(0, index_S, advantage_S.square()) / (count_G - 1).clamp(min=1)
        advantage_S = advantage_S / (variance_G.sqrt() + STD_FLOOR)[index_S]
    # The mean of equal rewards can be off by one rounding; over a spread as small, that would look like a signal.
    return torch.where(has_signal(reward_S, group_S), advantage_S, 0.0).float()


def has_signal(reward_S: Tensor, group_S: Tensor) -> Tensor:
    """Whether a response's group holds at least two different rewards, as driver.buffer.Group.flat asks. bool [S]."""
    index_S, count_G = torch.unique(group_S, return_inverse=True, return_counts=True)[1:]
    empty_G = torch.zeros(count_G.numel(), dtype=reward_S.dtype, device=reward_S.device)
    highest_G = empty_G.scatter_reduce(0, index_S, reward_S, "amax", include_self=False)
    lowest_G = empty_G.scatter_reduce(0, index_S, reward_S, "amin", include_self=False)
    return (highest_G > lowest_G)[index_S]


def _check_finite(reward_S: Tensor, group_S: Tensor) -> None:
    bad_S = torch.nonzero(~reward_S.isfinite()).flatten().tolist()
    if bad_S:
        s = bad_S[0]
        raise UserError(
            f"reward of response {s} (group {int(group_S[s])}) is {float(reward_S[s])} and {len(bad_S) - 1} more are "
            "not finite: expected a finite number; mend the reward function"
        )
