"""Group advantages against the formula by hand."""

from __future__ import annotations

import pytest
import torch

from minite.errors import UserError
from minite.losses.advantage import STD_FLOOR, group_advantage, has_signal


@pytest.mark.parametrize("normalize_std", [False, True])
def test_formula_with_groups_interleaved_and_of_different_size(normalize_std):
    rng = torch.Generator().manual_seed(0)
    group_S = torch.randint(0, 5, (40,), generator=rng) * 1000 - 7  # any ids, any order
    reward_S = torch.randn(40, generator=rng)
    advantage_S = group_advantage(reward_S, group_S, normalize_std)
    assert advantage_S.dtype == torch.float32
    for g in group_S.unique():
        mine = reward_S[group_S == g].double()
        spread = mine.std() + STD_FLOOR if normalize_std else 1.0
        # One rounding to float32.
        torch.testing.assert_close(
            advantage_S[group_S == g], ((mine - mine.mean()) / spread).float(), rtol=1e-6, atol=0
        )


@pytest.mark.parametrize("normalize_std", [False, True])
def test_flat_groups_get_exactly_zero(normalize_std):
    reward_S = torch.tensor([0.1] * 3 + [1.0] * 7 + [0.3] + [0.0, 1.0])
    group_S = torch.tensor([0] * 3 + [1] * 7 + [2] + [3, 3])
    advantage_S = group_advantage(reward_S, group_S, normalize_std)
    assert advantage_S[:11].tolist() == [0.0] * 11
    assert advantage_S[11] == -advantage_S[12] != 0
    assert has_signal(reward_S, group_S).tolist() == [False] * 11 + [True] * 2


def test_noise_below_the_floor_is_not_blown_up():
    advantage_S = group_advantage(torch.tensor([1.0, 1.0 + 1e-9], dtype=torch.float64), torch.zeros(2).long(), True)
    assert 0 < float(advantage_S.abs().max()) < 1e-2


def test_empty_batch():
    empty = torch.zeros(0)
    assert group_advantage(empty, empty.long(), True).shape == (0,)
    assert has_signal(empty, empty.long()).shape == (0,)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_reward_that_is_no_number_is_named(bad):
    with pytest.raises(UserError, match=r"reward of response 1 \(group 7\) is (nan|inf)"):
        group_advantage(torch.tensor([0.0, bad, 1.0]), torch.tensor([7, 7, 8]), True)
