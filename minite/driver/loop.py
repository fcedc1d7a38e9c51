"""The run: sample, score, correct, train, sync, measure, save. `Run.train_step` is the whole algorithm.

What can be wrong with a recipe is looked for before anything is written and before Ray starts.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from minite.config import PrecisionPlan, RunConfig, resolve_plan
from minite.diagnostics.gap import gap_metrics, gap_summary
from minite.driver import checkpoint, rundir, warm_start
from minite.driver.actors import LearnerGroup
from minite.driver.cluster import cluster
from minite.driver.exporters import Exporter, prometheus, records
from minite.driver.job import Job
from minite.driver.metrics import MetricsWriter, Recorder
from minite.driver.rollout import Rollouts
from minite.driver.samplers import SamplerPool
from minite.driver.verdict import obey, of_gradients
from minite.driver.watch import Watch
from minite.errors import DiskError, ProcessDied, UserError
from minite.losses.correction import CorrectionOutput, correct
from minite.losses.triage_state import TriageState
from minite.types import RolloutBatch


def train(config: RunConfig, run_dir: Path) -> None:
    """Run a recipe from its warm start into a new run directory. Raises UserError, ProcessDied."""
    job = Job(config, resolve_plan(config), run_dir)
    rundir.create(run_dir, config, job.plan)
    try:
        with rundir.locked(run_dir):
            _go(job, None)
    except BaseException:
        rundir.remove_unstarted(run_dir)
        raise


def resume(run_dir: Path, overrides: Sequence[str] = ()) -> None:
    """Go on from the newest valid checkpoint of a run directory, or from its start when there is none yet."""
    job = Job(*rundir.load(run_dir, overrides), run_dir)
    with rundir.locked(run_dir):
        folder = checkpoint.choose(run_dir, print)
        done, steps = checkpoint.step_of(folder) if folder else 0, job.config.driver.steps
        if done >= steps:
            raise UserError(f"{run_dir} is finished ({done} of {steps} steps): raise it with -o driver.steps=N")
        print(f"resuming from {checkpoint.shown(folder)}")
        if folder:
            job.check_backend(folder, checkpoint.read_run_state(folder))
        rundir.keep(run_dir, job.config)
        _go(job, folder)


def _go(job: Job, folder: Path | None) -> None:
    """Everything between opening a run and closing it; ``folder``: the checkpoint to go on from.

    When a learner rank dies or hangs, all processes are made anew and the run goes back to its newest checkpoint.
    """
    run_dir, view = job.run_dir, job.view
    with contextlib.closing(job), prometheus(job.config) as served, cluster(job.config, job.plan):
        view.note(f"run directory {run_dir}; if it is stopped, go on with: minite resume {run_dir}")
        view.note(f"plan {job.plan.digest[:12]}, {job.plan.alignment}; GEMMs: {job.backend}; starting the learner")
        for line in job.refused:
            view.note(f"  {line}")
        failed = 0.0  # when the last failure was seen
        while not _attempt(job, folder, failed, served):
            failed, folder = time.perf_counter(), checkpoint.choose(run_dir, view.note)
            view.note(f"going on from {checkpoint.shown(folder)}")
        view.note(f"done; see it with: minite report {run_dir}")


def _attempt(job: Job, folder: Path | None, failed: float, served: list[Exporter]) -> bool:
    """A run up to its end, True, or to the death of a process that only a new start repairs, False."""
    after_step = checkpoint.step_of(folder) if folder else -1
    learners = LearnerGroup(job.config, job.slot)
    samplers = SamplerPool(job.config, job.slot, job.recovery, learners.export)
    with (
        records(job.config, job.run_dir, after_step) as opened,
        MetricsWriter(job.run_dir, job.view, [*served, *opened], after_step=after_step) as metrics,
    ):
        job.recovery.add(metrics.repairs)
        try:
            warm_start.prepare(job.config, job.run_dir, learners, job.tokenizer, job.task.train, job.view.note)
            run = Run(job, learners, samplers, metrics)
            run.restore(folder) if folder else run.begin()
            if failed:
                job.recovery.count("recovery/restarts")
                job.recovery.count("recovery/seconds", time.perf_counter() - failed)
            run.loop()
        except ProcessDied as error:
            learners.kill()
            samplers.kill()
            job.recovery.spend(error, "all processes are started again")
            return False
    return True


class Run:
    """A run in progress. All its state is in `_state` and in the learner's checkpoint."""

    def __init__(self, job: Job, learners: LearnerGroup, samplers: SamplerPool, metrics: Recorder) -> None:
        self.config, self.plan, self.run_dir, self.view = job.config, job.plan, job.run_dir, job.view
        self.metrics, self.learners, self.samplers = metrics, learners, samplers
        self.learners.setup(job.config, job.plan)
        start = self.run_dir / rundir.START
        if start.is_dir():
            self.learners.load_hf(start)
        self.backend, self.recovery = job.backend, job.recovery
        self.samplers.use_plan(job.plan)
        self.rollouts = Rollouts(
            job.config, job.plan.digest, self.samplers, job.tokenizer, job.task, job.scorer, job.view.note
        )
        self.triage = TriageState()
        self.watch = Watch(job.config, job.plan, job.run_dir, job.view.note)
        self.step = 0
        self.unsaved = 0  # checkpoints in a row that could not be written when they were due
        self.values: dict[str, float] = {}  # metrics of the step in progress

    def begin(self) -> None:
        """Step 0: the first sync, and what the policy can do before any training."""
        self._sync()
        self._evaluate()
        self._write_metrics()

    def loop(self) -> None:
        while self.step < self.config.driver.steps:
            self.train_step()

    def train_step(self) -> None:
        started = time.perf_counter()
        with self._timed("rollout"):
            rollout = self.rollouts.next()
            batch = rollout.batch
            self.values |= rollout.metrics
        with self._timed("logprob"):
            batch.old_logprob_T, entropy_T = self.learners.logprobs(batch)
        with self._timed("correct"):
            verdict = self._correct(batch, entropy_T)
        with self._timed("train"):
            if not (verdict.unhealthy and self.config.correction.unhealthy == "skip"):
                self._optimize(batch)
        self.step += 1
        if self.config.monitor.watch:
            with self._timed("watch"):
                self._watch()
        with self._timed("sync"):
            self._sync()
        if self._due(self.config.driver.eval_every):
            with self._timed("eval"):
                self._evaluate()
        self.values["time/step"] = time.perf_counter() - started
        self._write_metrics()  # before the checkpoint: a kill between the two must not lose the line
        if self._due(self.config.driver.checkpoint_every) or self.unsaved:
            with self._timed("checkpoint"):  # counted in the next step's line
                self._save()
        self.recovery.step_done(self.step)

    def _correct(self, batch: RolloutBatch, entropy_T: torch.Tensor) -> CorrectionOutput:
        """Measure the gap and weigh each token by it."""
        assert batch.old_logprob_T is not None
        advantage_T, mask_T = batch.advantage_S[batch.sequence_T], batch.loss_mask_T
        gap = gap_summary(batch.old_logprob_T, batch.sampler_logprob_T, advantage_T, mask_T)
        verdict = correct(
            self.config.correction,
            batch.old_logprob_T,
            batch.sampler_logprob_T,
            advantage_T,
            mask_T,
            batch.sequence_T,
            self.triage,
        )
        batch.weight_T = verdict.weight_T
        assert self.rollouts.version is not None
        lag_S = self.rollouts.version.step - batch.weight_step_S
        self.values |= gap_metrics(gap) | verdict.metrics
        self.values |= {
            "entropy/mean": float(entropy_T[mask_T].mean()),
            "policy_lag/max": float(lag_S.max()),
            "correction/unhealthy": float(verdict.unhealthy),
        }
        if verdict.unhealthy:
            self._unhealthy(verdict)
        return verdict

    def _unhealthy(self, verdict: CorrectionOutput) -> None:
        settings = self.config.correction
        dropped, limit = f"{verdict.dropped_frac:.0%}", f"{settings.max_dropped_frac:.0%}"
        line = f"step {self.step + 1}: {dropped} of the tokens were dropped, more than {limit} (docs/triage.md)"
        obey(settings.unhealthy, "correction.unhealthy", line, self.run_dir, self.view.note)

    def _optimize(self, batch: RolloutBatch) -> None:
        """One optimizer step per minibatch; the metrics are their means, skipped steps are counted."""
        parts = torch.arange(batch.num_sequences).chunk(self.config.algo.minibatches)
        measured: dict[str, list[float]] = {}
        for index_S in parts:
            part = batch if len(parts) == 1 else batch.select(index_S)
            tokens = float(part.loss_mask_T.sum())
            told = self.learners.train_step(part, tokens, self.watch.lr_scale)
            if told["learner/skipped_steps"]:
                line = of_gradients(self.step + 1, self.learners.unsound_gradients())
                obey(self.config.learner.bad_gradient, "learner.bad_gradient", line, self.run_dir, self.view.note)
            for key, value in told.items():
                measured.setdefault(key, []).append(value)  # a skipped update has no gradient norm
        means = {key: sum(values) / len(values) for key, values in measured.items()}
        means["learner/skipped_steps"] = sum(measured["learner/skipped_steps"])
        self.values = means | self.values  # an entropy measured before the update stays

    def _watch(self) -> None:
        """See whether a trend broke and do what the recipe says. A switched plan holds from the next sync."""
        self.values |= self.learners.router_flips()
        self.values |= self.watch.observe(self.step, self.values)
        if self.watch.plan.digest != self.plan.digest:
            self.rollouts.settle()  # what is being sampled ends under the old plan
            rundir.record_switch(self.run_dir, self.step, self.watch.plan)
            self._use_plan(self.watch.plan)

    def _use_plan(self, plan: PrecisionPlan) -> None:
        """Learner and samplers under another plan; the samplers have no weights until the next sync."""
        self.plan = plan
        self.learners.use_plan(plan)
        self.samplers.use_plan(plan)
        self.rollouts.use_plan(plan.digest)

    def _sync(self) -> None:
        """Learner weights to every sampler, verified there; the samplers refuse to go on with any other bytes."""
        buckets, version, seconds = self.learners.export()
        seconds = seconds | self.samplers.update(buckets, version)
        self.values |= {f"sync/{phase}": spent for phase, spent in seconds.items()}
        self.rollouts.version = version

    def _evaluate(self) -> None:
        self.values |= self.rollouts.evaluate()

    def _save(self) -> None:
        self.rollouts.settle()
        try:
            checkpoint.write_checkpoint(self.run_dir, self.step, self.learners.save, self._state())
        except DiskError as error:
            self._not_saved(error)
            return
        self.unsaved = 0
        checkpoint.prune(self.run_dir, self.config.driver.checkpoints_kept)

    def _not_saved(self, error: DiskError) -> None:
        """A disk that is full now may have room soon: training goes on, and every further step tries again. Raises
        ``error`` when that has lasted for more than driver.retries due checkpoints, and at the end of the run."""
        self.recovery.count("recovery/checkpoints_failed")
        self.unsaved += bool(self._due(self.config.driver.checkpoint_every))
        if self.unsaved > self.config.driver.retries or self.step == self.config.driver.steps:
            raise error
        self.view.note(f"{error}; training goes on, the next step tries again")

    def _state(self) -> dict[str, Any]:
        assert self.rollouts.version is not None
        return {
            "step": self.step,
            "weight_digest": self.rollouts.version.weight_digest,
            "plan_digest": self.plan.digest,
            "backend": self.backend,
            "triage": self.triage.state_dict(),
            "watch": self.watch.state_dict(),
            "rollouts": self.rollouts.state_dict(),
        }

    def restore(self, folder: Path) -> None:
        """Everything as it was when ``folder`` was written, and proof that the weights are."""
        state = checkpoint.read_run_state(folder)
        self.watch.load_state_dict(state["watch"])
        if self.watch.plan.digest != self.plan.digest:
            self._use_plan(self.watch.plan)
        self.learners.load(folder)
        self.step = state["step"]
        self.triage.load_state_dict(state["triage"])
        self._sync()
        assert self.rollouts.version is not None
        if self.rollouts.version.weight_digest != state["weight_digest"]:
            raise UserError(
                f"{folder}: its weights have digest {self.rollouts.version.weight_digest[:12]}, it was written with "
                f"{state['weight_digest'][:12]}; remove this checkpoint and resume from an older one"
            )
        self.rollouts.load_state_dict(state["rollouts"])

    def _due(self, every: int) -> bool:
        """True at multiples of ``every`` and at the end."""
        return self.step % every == 0 or self.step == self.config.driver.steps

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.values[f"time/{phase}"] = time.perf_counter() - start

    def _write_metrics(self) -> None:
        self.metrics.write(self.step, self.values | self.recovery.take_metrics())
        self.values = {}
