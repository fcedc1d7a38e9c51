"""Microbatch plans and packed microbatches."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from minite.errors import UserError
from minite.learner.packing import pack, plan_microbatches
from tests.learner.tiny_policy import batch

CPU = torch.device("cpu")


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 40), max_size=30), st.integers(40, 120), st.integers(1, 4))
def test_plan_holds_every_response_once_within_the_limit(lengths, limit, ranks):
    plan = plan_microbatches(lengths, limit, ranks)
    assert plan and all(len(shares) == ranks for shares in plan)  # without any, a rank would have no metrics to sum
    assert sorted(i for shares in plan for share in shares for i in share) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in share) <= limit for shares in plan for share in shares)


def test_plan_uses_all_ranks_and_balances_them():
    (shares,) = plan_microbatches([10, 9, 8, 7, 6, 5], 1000, 2)
    assert [sum([10, 9, 8, 7, 6, 5][i] for i in share) for share in shares] == [23, 22]


def test_response_longer_than_a_microbatch_is_an_error():
    with pytest.raises(UserError, match="tokens_per_microbatch is 32, but .* 33 tokens"):
        plan_microbatches([5, 33], 32, 1)


@pytest.mark.parametrize("multiple", [1, 2, 4])
def test_packed_microbatch_keeps_tokens_and_pads_apart(multiple):
    data = batch([3, 5, 4, 6], replay=True)
    micro = pack(data, [3, 1], multiple, True, CPU)
    expected = torch.cat([data.tokens_T[12:18], data.tokens_T[3:8]])
    assert len(micro.tokens_T) % multiple == 0 and len(micro.tokens_T) < 11 + multiple
    assert torch.equal(micro.tokens_T[:11], expected)
    assert micro.position_T[:11].tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 2, 3, 4]
    assert micro.cu_seqlens.tolist() == [0, 6, 11] + ([len(micro.tokens_T)] if len(micro.tokens_T) > 11 else [])
    assert torch.equal(micro.replay_TLk[:6], data.routed_experts_TLk[12:18]) and (micro.replay_TLk[11:] == -1).all()
    mask_T = micro.take(data.loss_mask_T)
    assert torch.equal(mask_T[:6], data.loss_mask_T[12:18]) and not mask_T[11:].any()


@pytest.mark.parametrize("multiple", [1, 2])
def test_a_rank_without_responses_gets_padding_only(multiple):
    micro = pack(batch([3, 4]), [], multiple, False, CPU)
    assert len(micro.tokens_T) == multiple and len(micro.source_n) == 0
    assert micro.cu_seqlens.tolist() == [0, multiple]
    assert not micro.take(batch([3, 4]).loss_mask_T).any()
