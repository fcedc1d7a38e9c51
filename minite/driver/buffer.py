"""Completions in, rollout batches out: groups, rewards, dynamic sampling, and each prompt counted exactly once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minite.driver.data import Example, Prompt
from minite.driver.reward import BadReward
from minite.driver.tokenizer import Tokenizer
from minite.sampler.engine import Completion
from minite.types import RolloutBatch

NO_EXPERT = -1  # the last token of a response is never fed back, so no router saw it


class RolloutError(Exception):
    """A rollout that cannot be what was asked for: a defect in the engine or the driver, not in a user's input."""


def request_id(prompt_id: int, sample: int) -> str:
    """Sorts by prompt, then by sample."""
    return f"{prompt_id:012d}.{sample:05d}"


@dataclass(frozen=True)
class Group:
    """All responses to one prompt, by sample number."""

    prompt: Prompt
    completions: tuple[Completion, ...]
    rewards: tuple[float, ...]

    @property
    def flat(self) -> bool:
        """Equal rewards: no advantage, no gradient."""
        return len(set(self.rewards)) == 1


class RolloutBuffer:
    """Prompts go issue -> add -> take. Anything out of turn raises RolloutError.

    A group whose rewards are all equal is set aside when ``drop_flat``; `take` uses such groups only to keep the batch
    at its size when resampling did not find enough others.
    """

    def __init__(self, group_size: int, drop_flat: bool, plan_digest: str) -> None:
        self._group_size = group_size
        self._drop_flat = drop_flat
        self.plan_digest = plan_digest  # of the samplers; changes when the run switches its plan
        self._pending: dict[int, Prompt] = {}  # issued, not yet sampled
        self._ready: dict[int, Group] = {}
        self._flat: dict[int, Group] = {}
        self._last_id = -1
        self._bad = 0  # groups without rewards since the last take
        self._issued = self._trained = self._dropped = 0

    @property
    def ready(self) -> int:
        """Groups with a signal that wait for the learner."""
        return len(self._ready)

    def missing(self, count: int) -> int:
        """Groups, with or without a signal, that a take of ``count`` lacks."""
        return max(count - len(self._ready) - len(self._flat), 0)

    def issue(self, prompts: Sequence[Prompt]) -> None:
        """Note prompts as handed to a sampler. Ids grow over a run, which is what makes a second issue visible."""
        for prompt in prompts:
            if prompt.id <= self._last_id:
                raise RolloutError(f"prompt {prompt.id} issued again: ids up to {self._last_id} have been")
            self._last_id = prompt.id
            self._pending[prompt.id] = prompt
            self._issued += 1

    def add(
        self, completions: Sequence[Completion], reward_of: Callable[[Prompt, Completion], float], weight_step: int
    ) -> list[tuple[Prompt, BadReward]]:
        """Check, group and score completions of issued prompts; whole groups only. A group of which ``reward_of``
        raised BadReward is counted as dropped; returned with what was wrong.

        weight_step: WeightVersion.step that the samplers were told to use.
        """
        by_prompt: dict[int, dict[int, Completion]] = {}
        for completion in completions:
            prompt_id, sample = (int(part) for part in completion.request_id.split("."))
            self._check(completion, prompt_id, weight_step)
            samples = by_prompt.setdefault(prompt_id, {})
            if sample in samples:
                raise RolloutError(f"request {completion.request_id} came back twice")
            samples[sample] = completion
        groups, bad = [], []
        for prompt_id, samples in sorted(by_prompt.items()):
            if sorted(samples) != list(range(self._group_size)):
                raise RolloutError(f"prompt {prompt_id} has samples {sorted(samples)}, expected {self._group_size}")
            prompt = self._pending[prompt_id]
            ordered = tuple(samples[i] for i in range(self._group_size))
            try:
                groups.append(Group(prompt, ordered, tuple(reward_of(prompt, c) for c in ordered)))
            except BadReward as error:
                bad.append((prompt, error))
        for group in groups:  # only now, so that an error above changes nothing
            del self._pending[group.prompt.id]
            (self._flat if self._drop_flat and group.flat else self._ready)[group.prompt.id] = group
        for prompt, _ in bad:
            del self._pending[prompt.id]
        self._bad += len(bad)
        return bad

    def _check(self, completion: Completion, prompt_id: int, weight_step: int) -> None:
        name = f"request {completion.request_id}"
        version = completion.weight_version
        if prompt_id not in self._pending:
            raise RolloutError(f"{name} was not asked for, or its group has already been counted")
        if tuple(completion.prompt_tokens) != self._pending[prompt_id].tokens:
            raise RolloutError(f"{name} came back with another prompt than was sent")
        if completion.finish_reason == "abort":
            raise RolloutError(f"{name} was aborted")
        if version.plan_digest != self.plan_digest:
            raise RolloutError(f"{name} was sampled under plan {version.plan_digest}, expected {self.plan_digest}")
        if version.step != weight_step:
            raise RolloutError(f"{name} was sampled with weights of step {version.step}, expected {weight_step}")
        if len(completion.logprobs) != len(completion.tokens):
            raise RolloutError(f"{name} has {len(completion.tokens)} tokens but {len(completion.logprobs)} log-probs")

    def take(self, count: int) -> tuple[list[Group], dict[str, float]]:
        """Up to ``count`` groups in prompt order and the metrics of everything sampled since the last take.

        Groups without a signal fill what is missing, the rest of them is dropped. ``reward/mean`` is over all that was
        sampled: over the groups that are kept it would rise by the dropping alone. Raises RolloutError when more
        groups are ready: resampling asks for what is missing, nothing is thrown away.
        """
        if self.ready > count:
            raise RolloutError(f"{self.ready} groups are ready but only {count} are taken")
        sampled = [*self._ready.values(), *self._flat.values()]
        filling = [self._flat[i] for i in sorted(self._flat)[: count - self.ready]]
        groups = sorted([*self._ready.values(), *filling], key=lambda g: g.prompt.id)
        rewards = [r for group in sampled for r in group.rewards]
        metrics = {
            "rollout/groups": float(len(sampled)),
            "rollout/flat_frac": sum(g.flat for g in sampled) / max(len(sampled), 1),
            "rollout/filled_frac": len(filling) / max(len(groups), 1),
            "reward/mean": sum(rewards) / max(len(rewards), 1),
        }
        if self._bad:
            metrics["reward/failed_groups"] = float(self._bad)
        self._trained += len(groups)
        self._dropped += len(sampled) - len(groups) + self._bad
        self._bad = 0
        self._ready.clear()
        self._flat.clear()
        return groups, metrics

    def state_dict(self) -> dict[str, Any]:
        """Counts only. Save between a take and the next issue, when no group is under way; raises RolloutError else."""
        if self._pending or self._ready:
            raise RolloutError(f"{len(self._pending)} prompts and {len(self._ready)} groups are still under way")
        return {
            "last_id": self._last_id,
            "issued": self._issued,
            "trained": self._trained,
            "dropped": self._dropped,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["issued"] != state["trained"] + state["dropped"]:
            raise RolloutError(f"the saved counts do not add up: {state}")
        self._last_id = state["last_id"]
        self._issued, self._trained, self._dropped = state["issued"], state["trained"], state["dropped"]


def pack(groups: Sequence[Group], plan_digest: str) -> RolloutBatch:
    """The batch of the groups' responses, in order, in the packed layout of minite.types. Advantages are zero."""
    if not groups:
        raise RolloutError("no groups to pack")
    completions = [c for group in groups for c in group.completions]
    batch = _pack_tokens([(c.prompt_tokens, c.tokens) for c in completions], plan_digest)
    batch.sampler_logprob_T[batch.loss_mask_T] = torch.tensor(
        [logprob for c in completions for logprob in c.logprobs], dtype=torch.float64
    )
    batch.reward_S = torch.tensor([r for group in groups for r in group.rewards], dtype=torch.float32)
    batch.group_S = torch.tensor([g.prompt.id for g in groups for _ in g.completions], dtype=torch.int64)
    batch.weight_step_S = torch.tensor([c.weight_version.step for c in completions], dtype=torch.int64)
    batch.routed_experts_TLk = _pack_experts(completions)
    return batch


def supervised_batch(examples: Sequence[Example], tokenizer: Tokenizer, plan_digest: str) -> RolloutBatch:
    """Examples as a batch for the warm start: prompt, answer, eos; the loss mask covers answer and eos."""
    pairs = [(tokenizer.encode_prompt(e.prompt), [*tokenizer.encode(e.answer), tokenizer.eos_id]) for e in examples]
    return _pack_tokens(pairs, plan_digest)


def _pack_tokens(pairs: Sequence[tuple[Sequence[int], Sequence[int]]], plan_digest: str) -> RolloutBatch:
    """(prompt, response) pairs end to end; everything beside tokens, offsets and loss mask is zero."""
    tokens_T = torch.tensor([t for prompt, response in pairs for t in (*prompt, *response)], dtype=torch.int64)
    cu_seqlens_S1 = torch.zeros(len(pairs) + 1, dtype=torch.int64)
    cu_seqlens_S1[1:] = torch.tensor([len(p) + len(r) for p, r in pairs], dtype=torch.int64).cumsum(0)
    loss_mask = [counts for p, r in pairs for counts in [False] * len(p) + [True] * len(r)]
    return RolloutBatch(
        tokens_T=tokens_T,
        cu_seqlens_S1=cu_seqlens_S1,
        loss_mask_T=torch.tensor(loss_mask, dtype=torch.bool),
        sampler_logprob_T=torch.zeros(tokens_T.numel(), dtype=torch.float64),
        reward_S=torch.zeros(len(pairs), dtype=torch.float32),
        group_S=torch.arange(len(pairs)),
        advantage_S=torch.zeros(len(pairs), dtype=torch.float32),
        weight_step_S=torch.zeros(len(pairs), dtype=torch.int64),
        plan_digest=plan_digest,
    )


def _pack_experts(completions: Sequence[Completion]) -> Tensor | None:
    """int16 [T, MoE layers, k], the last position of each response filled with NO_EXPERT; None for dense models."""
    recorded = [c.routed_experts for c in completions if c.routed_experts is not None]
    if not recorded:
        return None
    if len(recorded) != len(completions):
        raise RolloutError(f"{len(completions) - len(recorded)} of {len(completions)} responses lack routed experts")
    parts = []
    for completion, experts_TLk in zip(completions, recorded, strict=True):
        length = len(completion.prompt_tokens) + len(completion.tokens)
        if experts_TLk.shape[0] != length - 1:
            raise RolloutError(
                f"request {completion.request_id} has routed experts for {experts_TLk.shape[0]} tokens, expected "
                f"{length - 1}: every token but the last"
            )
        parts += [experts_TLk.to(torch.int16), torch.full((1, *experts_TLk.shape[1:]), NO_EXPERT, dtype=torch.int16)]
    return torch.cat(parts)
