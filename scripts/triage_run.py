"""One run of the TRIAGE evidence: learner and sampler in this process, without Ray, on one core.

The steps are those of ``minite.driver.loop``; what differs is that the two engines may have plans of their own, that
the sampler may be synced every few steps only, and that a placebo may shuffle the weights.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from triage_cases import ARMS, CHUNK, TAIL, recipe, sampler_recipe
from triage_placebo import shuffled

from minite.config import RunConfig, resolve_plan
from minite.config.schema import CorrectionConfig
from minite.diagnostics.gap import gap_metrics, gap_summary
from minite.driver import checkpoint, warm_start
from minite.driver.buffer import Group, pack, request_id
from minite.driver.data import PromptStream, load_task
from minite.driver.gap.local import LocalLearner, Pair, start_learner
from minite.driver.metrics import METRICS_FILE, MetricsWriter
from minite.driver.tokenizer import make_tokenizer
from minite.losses.advantage import group_advantage
from minite.losses.correction import correct
from minite.losses.tokens import LossTokens, loss_tokens
from minite.losses.triage import Region, token_regions
from minite.losses.triage_state import TriageState
from minite.sampler import make_engine
from minite.sampler.engine import Completion, Request, SamplingParams
from minite.types import RolloutBatch

KEPT = (  # keys of docs/metrics.md that a run of thousands of steps keeps
    "reward/mean", "entropy/mean", "gap/abs_mean", "gap/mean", "gap/p0.1", "gap/p1", "gap/p99", "gap/p99.9",
    "gap/corr_advantage", "ratio/ess", "correction/dropped_frac", "correction/weight_mean", "learner/grad_norm",
    "loss/clip_frac", "time/step",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """One run, and where it lives."""

    precision: str
    arm: str
    seed: int
    steps: int
    sync_every: int
    checkpoint_every: int
    folder: Path  # checkpoints and every step
    results: Path  # a file that all runs append their means of CHUNK steps to
    data: Path
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.precision}/{self.arm}/seed{self.seed}"

    def config(self) -> RunConfig:
        return recipe(self.precision, self.arm, self.seed, self.steps, self.data, list(self.overrides))


class _Rollouts:
    """Prompts in turn, their responses from the engine at hand, their rewards: a batch with advantages.

    What minite.driver.rollout does in a run, without its actors, its resampling and its one step ahead.
    """

    def __init__(self, config: RunConfig, pair: Pair) -> None:
        self._config, self._engine = config, pair.engine
        self._digest = pair.worker._policy.plan.digest
        self._tokenizer = make_tokenizer(config)
        self.stream = PromptStream(load_task(config, self._tokenizer).train, self._tokenizer, config.seed)

    def next(self) -> RolloutBatch:
        algo, s = self._config.algo, self._config.sampler
        prompts = self.stream.take(algo.prompts_per_step)
        params = SamplingParams(s.max_new_tokens, s.temperature, s.top_p, s.top_k, (self._tokenizer.eos_id,))
        asked = [Request(request_id(p.id, i), p.tokens, params) for p in prompts for i in range(algo.group_size)]
        done = self._engine.generate(asked)  # in the order of the requests; each draws by its id and the run's seed
        groups = []
        for i, prompt in enumerate(prompts):
            mine = tuple(done[i * algo.group_size : (i + 1) * algo.group_size])
            groups.append(Group(prompt, mine, tuple(self._score(c, prompt.example.answer) for c in mine)))
        batch = pack(groups, self._digest)
        batch.advantage_S = group_advantage(batch.reward_S, batch.group_S, algo.normalize_std)
        return batch

    def _score(self, completion: Completion, answer: str) -> float:
        whole = completion.finish_reason == "stop"
        return float(whole and self._tokenizer.decode(completion.tokens) == answer)


def start_weights(job: Job) -> None:
    """Make the warm start of a job's seed, in the cache that all its runs read."""
    torch.set_num_threads(1)
    _prepare(job.config(), job.folder)


def _prepare(config: RunConfig, folder: Path) -> None:
    tokenizer = make_tokenizer(config)
    learner = LocalLearner()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        warm_start.prepare(config, folder, learner, tokenizer, load_task(config, tokenizer).train, lambda line: None)
    finally:
        learner.close()


def go(job: Job, until: float) -> bool:
    """Run or go on with a job until it is done or time.time() passes ``until``. Returns whether it is done."""
    if time.time() > until:
        return False
    torch.set_num_threads(1)
    config = job.config()
    _prepare(config, job.folder)
    found, _ = checkpoint.newest_valid(job.folder)
    done = checkpoint.step_of(found) if found else 0
    if done >= job.steps:
        return True
    with (
        _engines(config, job.precision) as pair,
        closing(
            MetricsWriter(job.folder, None, after_step=done)
        ) as metrics,  # the parent shows the progress of all runs
    ):
        run = _Run(job, config, pair)
        run.restore(found) if found else run.begin()
        lines = read_metrics(job.folder)
        while run.step < job.steps:
            lines.append(run.train_step())
            metrics.write(run.step, lines[-1])
            if run.step % CHUNK == 0:
                publish(job, run.step, lines[-CHUNK:])
            late = time.time() > until
            if run.step % job.checkpoint_every == 0 or run.step == job.steps or (late and run.in_sync):
                run.save()
            if late:
                break
        return run.step >= job.steps


@contextmanager
def _engines(config: RunConfig, precision: str) -> Iterator[Pair]:
    """A learner of one plan and a sampler of another; what is exported is quantized by the sampler's."""
    sampler = sampler_recipe(config, precision)
    plan = resolve_plan(sampler)
    with closing(start_learner(config, resolve_plan(config))) as worker, closing(make_engine(sampler, plan)) as engine:
        worker._policy.plan = plan  # read at export only, once the modules are bound
        yield Pair(worker, engine)


class _Run:
    def __init__(self, job: Job, config: RunConfig, pair: Pair) -> None:
        self.job, self.config, self.pair = job, config, pair
        self.rollouts = _Rollouts(config, pair)
        self.triage = TriageState()
        self.step = 0

    @property
    def in_sync(self) -> bool:
        return self.step % self.job.sync_every == 0

    def begin(self) -> None:
        self.pair.worker.load_hf(self.job.folder / "start")
        self.pair.sync()

    def train_step(self) -> dict[str, float]:
        """One rollout and its optimizer steps. The metrics that are kept, to five digits."""
        started = time.perf_counter()
        batch = self.rollouts.next()
        batch.old_logprob_T, entropy_T = self.pair.worker.logprobs(batch)
        values = self._weigh(batch)
        values["reward/mean"] = float(batch.reward_S.mean())
        values["entropy/mean"] = float(entropy_T[batch.loss_mask_T].mean())
        for index_S in torch.arange(batch.num_sequences).chunk(self.config.algo.minibatches):
            part = batch.select(index_S)
            values = self.pair.worker.train_step(part, float(part.loss_mask_T.sum())) | values
        self.step += 1
        if self.in_sync:
            self.pair.sync()
        values["time/step"] = time.perf_counter() - started
        return {key: float(f"{values[key]:.5g}") for key in (*KEPT, TAIL) if key in values}

    def _weigh(self, batch: RolloutBatch) -> dict[str, float]:
        assert batch.old_logprob_T is not None
        advantage_T = batch.advantage_S[batch.sequence_T]
        seen = (batch.old_logprob_T, batch.sampler_logprob_T, advantage_T, batch.loss_mask_T)
        verdict = correct(self.config.correction, *seen, batch.sequence_T, self.triage)
        tokens = loss_tokens(*seen, batch.sequence_T)
        batch.weight_T = verdict.weight_T
        if ARMS[self.job.arm].placebo:
            generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + self.step)
            batch.weight_T = verdict.weight_T.clone()
            batch.weight_T[batch.loss_mask_T] = shuffled(verdict.weight_T[batch.loss_mask_T], tokens, generator)
        return gap_metrics(gap_summary(*seen)) | verdict.metrics | {TAIL: negative_tail(tokens)}

    def save(self) -> None:
        if not self.in_sync:
            raise AssertionError("the sampler's weights are older than the checkpoint")
        state: dict[str, Any] = {"triage": self.triage.state_dict(), "stream": self.rollouts.stream.state_dict()}
        checkpoint.write_checkpoint(self.job.folder, self.step, self.pair.worker.save, state)
        checkpoint.prune(self.job.folder, 1)

    def restore(self, folder: Path) -> None:
        state = checkpoint.read_state(folder)
        self.pair.worker.load(folder)
        self.step = checkpoint.step_of(folder)
        self.triage.load_state_dict(state["triage"])
        self.pair.sync()
        self.rollouts.stream.load_state_dict(state["stream"])


def negative_tail(tokens: LossTokens) -> float:
    """Share of the loss tokens that are tail by themselves with a negative advantage, by TRIAGE's default limits."""
    default = CorrectionConfig()
    assert isinstance(default.calm, float)
    tail_N = (token_regions(default, tokens, default.calm) == Region.TAIL) & (tokens.advantage_N < 0)
    return int(tail_N.sum()) / max(tokens.num_tokens, 1)


def publish(job: Job, step: int, lines: Sequence[Mapping[str, float]]) -> None:
    """Append the means of the steps up to ``step``: one write, so that lines of several processes do not mix."""
    means = {}
    for key in (*KEPT, TAIL):
        values = [line[key] for line in lines if line.get(key) is not None]
        if values:
            means[key] = float(f"{statistics.fmean(values):.5g}")
    record = {"precision": job.precision, "correction": job.arm, "seed": job.seed, "steps": job.steps, "step": step}
    text = json.dumps(record | means) + "\n"
    file = os.open(job.results, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, text.encode())
    finally:
        os.close(file)


def read_metrics(folder: Path) -> list[dict[str, float]]:
    """The lines of a run that are whole; a killed process may leave a torn last one."""
    path = folder / METRICS_FILE
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]
