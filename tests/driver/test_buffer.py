"""Grouping, counting and packing of completions."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from minite.driver.buffer import RolloutBuffer, RolloutError, pack, request_id, supervised_batch
from minite.driver.data import Example, Prompt
from minite.driver.reward import BadReward
from minite.driver.tokenizer import CharTokenizer
from minite.sampler.engine import Completion
from minite.types import WeightVersion

PLAN = "plan-a"
VERSION = WeightVersion(7, PLAN, "weights")
LAYERS, TOP_K, GROUP = 3, 2, 4


def make_prompt(prompt_id: int) -> Prompt:
    example = Example(f"{prompt_id}+1=", str(prompt_id + 1), f"1+{prompt_id}")
    return Prompt(prompt_id, example, tuple(CharTokenizer().encode(example.prompt)))


def make_completion(prompt: Prompt, sample: int, rng: random.Random, moe: bool = True) -> Completion:
    tokens = [rng.randrange(2, 32) for _ in range(rng.randrange(1, 9))]
    experts = torch.tensor(
        [
            [[rng.randrange(128) for _ in range(TOP_K)] for _ in range(LAYERS)]
            for _ in range(len(prompt.tokens) + len(tokens) - 1)
        ],
        dtype=torch.int16,
    )
    return Completion(
        request_id(prompt.id, sample),
        prompt.tokens,
        tokens,
        [-rng.random() for _ in tokens],
        "stop",
        VERSION,
        experts if moe else None,
    )


def sampled(prompts: Sequence[Prompt], seed: int = 0, moe: bool = True) -> list[Completion]:
    """A whole round of completions in a shuffled order."""
    rng = random.Random(seed)
    completions = [make_completion(p, i, rng, moe) for p in prompts for i in range(GROUP)]
    rng.shuffle(completions)
    return completions


def mixed(prompt: Prompt, completion: Completion) -> float:
    """Rewards 1 0 1 0 for even prompts, all 0 for odd ones (a flat group)."""
    sample = int(completion.request_id.split(".")[1])
    return float(prompt.id % 2 == 0 and sample % 2 == 0)


def make_buffer(drop_flat: bool = True) -> RolloutBuffer:
    return RolloutBuffer(GROUP, drop_flat, PLAN)


def test_groups_come_out_in_prompt_and_sample_order_with_their_rewards() -> None:
    prompts = [make_prompt(i) for i in (3, 4, 9, 12)]
    buffer = make_buffer(drop_flat=False)
    buffer.issue(prompts)
    completions = sampled(prompts)
    buffer.add(completions[:0], mixed, 7)
    assert buffer.ready == 0
    assert buffer.add(completions, mixed, 7) == [] and buffer.ready == 4
    groups, metrics = buffer.take(4)
    assert [g.prompt.id for g in groups] == [3, 4, 9, 12]
    assert [[int(c.request_id[-5:]) for c in g.completions] for g in groups] == [[0, 1, 2, 3]] * 4
    assert [g.rewards for g in groups] == [(0,) * 4, (1, 0, 1, 0), (0,) * 4, (1, 0, 1, 0)]
    assert metrics["reward/mean"] == 0.25
    assert metrics["rollout/flat_frac"] == 0.5
    assert buffer.state_dict() == {"last_id": 12, "issued": 4, "trained": 4, "dropped": 0}


def test_flat_groups_are_dropped_when_resampling_finds_others() -> None:
    buffer = make_buffer()
    for ids in ((0, 1, 2, 3), (4, 6)):
        prompts = [make_prompt(i) for i in ids]
        buffer.issue(prompts)
        buffer.add(sampled(prompts), mixed, 7)
    groups, metrics = buffer.take(4)
    assert [g.prompt.id for g in groups] == [0, 2, 4, 6]
    assert not any(g.flat for g in groups)
    assert metrics["rollout/groups"] == 6
    assert metrics["rollout/flat_frac"] == pytest.approx(1 / 3)
    assert metrics["rollout/filled_frac"] == 0
    assert metrics["reward/mean"] == pytest.approx(8 / 24)  # the dropped groups count too
    assert buffer.state_dict() == {"last_id": 6, "issued": 6, "trained": 4, "dropped": 2}
    assert buffer.take(4) == (
        [],
        {"rollout/groups": 0, "rollout/flat_frac": 0, "rollout/filled_frac": 0, "reward/mean": 0},
    )


def test_flat_groups_fill_a_batch_that_resampling_could_not() -> None:
    buffer = make_buffer()
    prompts = [make_prompt(i) for i in (1, 2, 3, 5, 7)]
    buffer.issue(prompts)
    buffer.add(sampled(prompts), mixed, 7)
    groups, metrics = buffer.take(3)
    assert [g.prompt.id for g in groups] == [1, 2, 3]
    assert metrics["rollout/filled_frac"] == pytest.approx(2 / 3)
    assert buffer.state_dict() == {"last_id": 7, "issued": 5, "trained": 3, "dropped": 2}


def test_taking_fewer_than_are_ready_is_refused() -> None:
    buffer = make_buffer()
    prompts = [make_prompt(i) for i in (0, 2)]
    buffer.issue(prompts)
    buffer.add(sampled(prompts), mixed, 7)
    with pytest.raises(RolloutError, match="2 groups are ready but only 1 are taken"):
        buffer.take(1)


def spoil(completions: list[Completion], what: str) -> list[Completion]:
    first, rest = completions[0], completions[1:]
    changes = {
        "weights of step 6, expected 7": {"weight_version": replace(VERSION, step=6)},
        "under plan plan-b, expected plan-a": {"weight_version": replace(VERSION, plan_digest="plan-b")},
        "was aborted": {"finish_reason": "abort"},
        "another prompt than was sent": {"prompt_tokens": (*first.prompt_tokens, 3)},
        "log-probs": {"logprobs": first.logprobs[:-1]},
        "was not asked for": {"request_id": request_id(99, 0)},
    }
    if what == "came back twice":
        return [first, first, *rest]
    if what == "has samples":
        return rest
    return [replace(first, **changes[what]), *rest]


@pytest.mark.parametrize(
    "what",
    [
        "weights of step 6, expected 7",
        "under plan plan-b, expected plan-a",
        "was aborted",
        "another prompt than was sent",
        "log-probs",
        "was not asked for",
        "came back twice",
        "has samples",
    ],
)
def test_a_wrong_completion_is_refused_and_changes_nothing(what: str) -> None:
    buffer, prompts = make_buffer(), [make_prompt(i) for i in (2, 4)]
    buffer.issue(prompts)
    good = sampled(prompts)
    with pytest.raises(RolloutError, match=what):
        buffer.add(spoil(good, what), mixed, 7)
    assert buffer.ready == 0
    buffer.add(good, mixed, 7)
    assert buffer.ready == 2


def test_each_prompt_is_issued_once_and_counted_once() -> None:
    buffer, prompts = make_buffer(), [make_prompt(i) for i in (2, 4)]
    buffer.issue(prompts)
    with pytest.raises(RolloutError, match="prompt 4 issued again"):
        buffer.issue(prompts[1:])
    completions = sampled(prompts)
    buffer.add(completions, mixed, 7)
    with pytest.raises(RolloutError, match="already been counted"):
        buffer.add(completions, mixed, 7)
    buffer.take(2)
    with pytest.raises(RolloutError, match="already been counted"):
        buffer.add(completions, mixed, 7)


def test_resumed_buffer_refuses_what_was_counted_before() -> None:
    buffer, prompts = make_buffer(), [make_prompt(i) for i in (2, 4)]
    buffer.issue(prompts)
    with pytest.raises(RolloutError, match="2 prompts and 0 groups are still under way"):
        buffer.state_dict()
    buffer.add(sampled(prompts), mixed, 7)
    with pytest.raises(RolloutError, match="0 prompts and 2 groups are still under way"):
        buffer.state_dict()
    buffer.take(2)
    resumed = make_buffer()
    resumed.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert resumed.state_dict() == buffer.state_dict()
    with pytest.raises(RolloutError, match="prompt 4 issued again"):
        resumed.issue(prompts[1:])
    with pytest.raises(RolloutError, match="do not add up"):
        resumed.load_state_dict({**buffer.state_dict(), "trained": 1})


@pytest.mark.parametrize("moe", [True, False])
def test_pack_places_every_value_at_its_token(moe: bool) -> None:
    buffer, prompts = make_buffer(drop_flat=False), [make_prompt(i) for i in (1, 12, 345)]
    buffer.issue(prompts)
    buffer.add(sampled(prompts, seed=5, moe=moe), mixed, 7)
    groups, _ = buffer.take(3)
    batch = pack(groups, PLAN)
    completions = [c for g in groups for c in g.completions]
    assert batch.num_sequences == len(completions) == 12
    assert batch.group_S.tolist() == [1] * 4 + [12] * 4 + [345] * 4
    assert batch.weight_step_S.tolist() == [7] * 12
    assert batch.reward_S.tolist() == [r for g in groups for r in g.rewards]
    assert batch.plan_digest == PLAN and not batch.advantage_S.any()
    for i, c in enumerate(completions):
        one = batch.select(torch.tensor([i]))
        prompt, response = len(c.prompt_tokens), len(c.tokens)
        assert one.tokens_T.tolist() == [*c.prompt_tokens, *c.tokens]
        assert one.loss_mask_T.tolist() == [False] * prompt + [True] * response
        assert one.sampler_logprob_T.tolist() == [0.0] * prompt + c.logprobs  # exact: float64 all the way
        if moe:
            assert torch.equal(one.routed_experts_TLk[:-1], c.routed_experts)
            assert one.routed_experts_TLk[-1].eq(-1).all()
        else:
            assert one.routed_experts_TLk is None


def test_pack_refuses_missing_or_short_experts() -> None:
    prompts = [make_prompt(2)]
    for changes, message in (
        ({"routed_experts": None}, "1 of 4 responses lack routed experts"),
        ({"routed_experts": torch.zeros(1, LAYERS, TOP_K, dtype=torch.int16)}, "routed experts for 1 tokens, expected"),
    ):
        buffer = make_buffer()
        buffer.issue(prompts)
        completions = sampled(prompts)
        buffer.add([replace(completions[0], **changes), *completions[1:]], mixed, 7)
        with pytest.raises(RolloutError, match=message):
            pack(buffer.take(1)[0], PLAN)
    with pytest.raises(RolloutError, match="no groups"):
        pack([], PLAN)


def test_supervised_batch_trains_on_answer_and_eos() -> None:
    tokenizer = CharTokenizer()
    examples = [Example("3+5=", "8", "3+5"), Example("70+50=", "120", "50+70")]
    batch = supervised_batch(examples, tokenizer, PLAN)
    assert batch.cu_seqlens_S1.tolist() == [0, 6, 16]
    assert batch.tokens_T.tolist() == [*tokenizer.encode("3+5=8"), 1, *tokenizer.encode("70+50=120"), 1]
    assert batch.loss_mask_T.tolist() == [False] * 4 + [True] * 2 + [False] * 6 + [True] * 4


def test_a_group_without_rewards_is_counted_and_left_out() -> None:
    buffer, prompts = make_buffer(), [make_prompt(i) for i in (2, 4)]
    buffer.issue(prompts)

    def reward(prompt: Prompt, completion: Completion) -> float:
        if prompt.id == 4:
            raise BadReward("it hung")
        return mixed(prompt, completion)

    bad = buffer.add(sampled(prompts), reward, 7)
    assert [(prompt.id, str(error)) for prompt, error in bad] == [(4, "it hung")]
    assert (buffer.ready, buffer.missing(2), buffer.missing(1)) == (1, 1, 0)
    groups, metrics = buffer.take(2)
    assert [g.prompt.id for g in groups] == [2] and metrics["reward/failed_groups"] == 1.0
    assert buffer.state_dict() == {"last_id": 4, "issued": 2, "trained": 1, "dropped": 1}
