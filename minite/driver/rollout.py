"""From prompts to the batch that the learner trains on, and the held-out check. With ``ahead`` the next rollout is
sampled while the learner trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from minite.config import RunConfig
from minite.driver.buffer import RolloutBuffer, pack, request_id
from minite.driver.data import Example, Prompt, PromptStream, Task
from minite.driver.reward import BadReward, Scorer
from minite.driver.samplers import SamplerPool, Share
from minite.driver.tokenizer import Tokenizer
from minite.errors import UserError
from minite.losses.advantage import group_advantage
from minite.sampler.engine import Completion, Request, SamplingParams
from minite.types import RolloutBatch, WeightVersion


@dataclass
class Rollout:
    """What one training step consumes."""

    batch: RolloutBatch  # advantages filled; old_logprob_T and weight_T not yet
    metrics: dict[str, float]

    def state_dict(self) -> dict[str, Any]:
        return {"batch": dict(vars(self.batch)), "metrics": self.metrics}

    @classmethod
    def from_state(cls, state: dict[str, Any]) -> Rollout:
        return cls(RolloutBatch(**state["batch"]), state["metrics"])


class Rollouts:
    """The stream of rollouts of a run. ``version`` must be set, by whoever syncs, before the first one."""

    def __init__(
        self,
        config: RunConfig,
        plan_digest: str,
        samplers: SamplerPool,
        tokenizer: Tokenizer,
        task: Task,
        scorer: Scorer,
        note: Callable[[str], None],
    ) -> None:
        self._config, self._samplers, self._tokenizer = config, samplers, tokenizer
        self._plan_digest = plan_digest
        self._heldout, self._reward, self._note = task.heldout, scorer, note
        self._stream = PromptStream(task.train, tokenizer, config.seed)
        self._buffer = RolloutBuffer(config.algo.group_size, config.algo.drop_flat_groups, plan_digest)
        self._draft: list[Share] | None = None  # being sampled
        self._settled: Rollout | None = None  # sampled before its turn, for a checkpoint
        self.version: WeightVersion | None = None

    def use_plan(self, plan_digest: str) -> None:
        """What is sampled from now on is sampled under another plan. Settle first."""
        self._plan_digest = self._buffer.plan_digest = plan_digest

    def next(self) -> Rollout:
        """The next rollout. With ``driver.ahead`` the one after it starts sampling, with the present weights."""
        rollout = self._settled or self._finish(self._draft or self._start(self._config.algo.prompts_per_step))
        self._settled = self._draft = None
        if self._config.driver.ahead:
            self._draft = self._start(self._config.algo.prompts_per_step)
        return rollout

    def evaluate(self) -> dict[str, float]:
        """Share of the held-out questions answered rightly; empty when there are none."""
        if not self._heldout:
            return {}
        params = replace(self._sampling(), temperature=self._config.driver.eval_temperature, top_p=1.0, top_k=0)
        groups = []
        for i, example in enumerate(self._heldout):
            tokens = tuple(self._tokenizer.encode_prompt(example.prompt))
            seeded = replace(params, seed=_seed(self._config.seed, "heldout", i, 0))
            groups.append([Request(f"heldout.{i:06d}", tokens, seeded)])
        completions = self._samplers.collect(self._samplers.submit(groups))
        scores, bad = [], 0
        for example, completion in zip(self._heldout, completions, strict=True):
            try:
                scores.append(self._score(example, completion))
            except BadReward as error:
                self._bad_reward(example, error)
                bad += 1
        measured = {"accuracy/heldout": sum(scores) / len(scores)} if scores else {}
        return measured | ({"reward/failed_heldout": float(bad)} if bad else {}) | self._ended("reward/ended_heldout")

    def _start(self, count: int) -> list[Share]:
        prompts = self._stream.take(count)
        self._buffer.issue(prompts)
        return self._samplers.submit([self._requests(p) for p in prompts])

    def _finish(self, draft: list[Share]) -> Rollout:
        """Wait for a draft; replace groups without a signal by new prompts, ``max_resample`` times at most. Groups
        without rewards are replaced too, ``driver.retries`` times."""
        algo = self._config.algo
        self._collect(draft)
        for _ in range(algo.max_resample if algo.drop_flat_groups else 0):
            missing = algo.prompts_per_step - self._buffer.ready
            if missing == 0:
                break
            self._collect(self._start(missing))
        for _ in range(self._config.driver.retries):
            if self._buffer.missing(algo.prompts_per_step) == 0:
                break
            self._collect(self._start(self._buffer.missing(algo.prompts_per_step)))
        if missing := self._buffer.missing(algo.prompts_per_step):
            raise UserError(
                f"data.reward: {self._config.data.reward} has failed for so many responses that {missing} of "
                f"{algo.prompts_per_step} groups are missing after {self._config.driver.retries} further rounds; "
                "mend it, then resume"
            )
        groups, metrics = self._buffer.take(algo.prompts_per_step)
        batch = pack(groups, self._plan_digest)
        batch.advantage_S = group_advantage(batch.reward_S, batch.group_S, algo.normalize_std)
        responses = [c for g in groups for c in g.completions]
        metrics["response/length_mean"] = sum(len(c.tokens) for c in responses) / len(responses)
        metrics["response/cut_frac"] = sum(c.finish_reason == "length" for c in responses) / len(responses)
        return Rollout(batch, metrics | self._ended("reward/ended"))

    def _ended(self, key: str) -> dict[str, float]:
        """How many answers the task's own scorer did not outlive, when there was one."""
        ended, self._reward.ended = self._reward.ended, 0
        return {key: float(ended)} if ended else {}

    def _collect(self, draft: list[Share]) -> None:
        for share in draft:
            completions = self._samplers.collect([share])
            bad = self._buffer.add(completions, lambda p, c: self._score(p.example, c), share.weight_step)
            for group, error in bad:
                self._bad_reward(group.example, error)

    def _bad_reward(self, example: Example, error: BadReward) -> None:
        data = self._config.data
        line = f"data.reward: {data.reward} failed for the prompt {example.prompt[:40]!r}: {error}"
        if data.bad_reward == "stop":
            raise UserError(f"{line}; stopped as data.bad_reward says")
        self._note(f"{line}; its group is left out")

    def _score(self, example: Example, completion: Completion) -> float:
        """A response that never ended is wrong, whatever it starts with."""
        if completion.finish_reason != "stop":
            return 0.0
        return self._reward(example, self._tokenizer.decode(completion.tokens))

    def _requests(self, prompt: Prompt) -> list[Request]:
        params, seed = self._sampling(), self._config.seed
        seeded = [replace(params, seed=_seed(seed, "train", prompt.id, i)) for i in range(self._config.algo.group_size)]
        return [Request(request_id(prompt.id, i), prompt.tokens, p) for i, p in enumerate(seeded)]

    def _sampling(self) -> SamplingParams:
        s = self._config.sampler
        return SamplingParams(s.max_new_tokens, s.temperature, s.top_p, s.top_k, (self._tokenizer.eos_id,))

    def settle(self) -> None:
        """Wait for what is being sampled and keep it for its turn, so that `state_dict` can hold it."""
        if self._draft is not None:
            self._settled, self._draft = self._finish(self._draft), None

    def state_dict(self) -> dict[str, Any]:
        assert self._draft is None, "settle first"
        settled = self._settled.state_dict() if self._settled else None
        return {"stream": self._stream.state_dict(), "buffer": self._buffer.state_dict(), "settled": settled}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._stream.load_state_dict(state["stream"])
        self._buffer.load_state_dict(state["buffer"])
        self._settled = Rollout.from_state(state["settled"]) if state["settled"] else None


def _seed(run_seed: int, purpose: str, prompt: int, sample: int) -> int:
    """A request's own seed: the same after a resume, whatever was sampled before."""
    text = f"{run_seed}|{purpose}|{prompt}|{sample}"
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
