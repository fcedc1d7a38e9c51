"""Responses from the sampler, log-probs of the same tokens from the learner: the batch that a gap is measured on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minite.config import PrecisionPlan, RunConfig
from minite.diagnostics.breakdown import Breakdown, breakdown
from minite.driver.buffer import Group, pack, request_id
from minite.driver.data import Prompt
from minite.driver.gap.local import Pair, pair
from minite.driver.gap.subject import Load, Note, Subject
from minite.sampler.engine import Request, SamplingParams
from minite.types import RolloutBatch


def measure(subject: Subject, note: Note) -> Breakdown:
    """The gap of a recipe or a run, its own group size for each prompt."""
    note(f"plan {subject.plan.digest[:12]}, {subject.plan.alignment}; sampling {len(subject.prompts)} prompts")
    return gap_of(subject, subject.config, subject.plan, subject.load)


def gap_of(subject: Subject, config: RunConfig, plan: PrecisionPlan, load: Load) -> Breakdown:
    """The gap under a plan that may be another than the subject's, on the subject's prompts."""
    with pair(config, plan) as engines:
        load(engines.worker)
        engines.sync()
        batch = rollout(engines, config, plan, subject.prompts, subject.stop_token)
        batch.old_logprob_T, entropy_T = engines.worker.logprobs(batch)
        return breakdown(batch, entropy_T)


def rollout(
    engines: Pair,
    config: RunConfig,
    plan: PrecisionPlan,
    prompts: Sequence[Prompt],
    stop_token: int,
    keep: Callable[[Sequence[Request]], Sequence[Request]] = tuple,
) -> RolloutBatch:
    """Responses to the prompts, ``algo.group_size`` for each, as the batch that the learner takes. ``keep``: fewer."""
    s, size = config.sampler, config.algo.group_size
    params = SamplingParams(s.max_new_tokens, s.temperature, s.top_p, s.top_k, (stop_token,))
    asked = [Request(request_id(p.id, i), p.tokens, params) for p in prompts for i in range(size)]
    completions = engines.engine.generate(list(keep(asked)))
    by_id = {prompt.id: prompt for prompt in prompts}
    # One group for each response: rewards, which are of groups, play no part here.
    groups = [Group(by_id[int(c.request_id.split(".")[0])], (c,), (0.0,)) for c in completions]
    return pack(groups, plan.digest)
