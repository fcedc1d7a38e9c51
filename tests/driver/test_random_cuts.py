"""A run cut at random moments of its steps goes on, with any number of samplers, as one that was never cut. BITWISE."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from minite.config import resolve_plan
from minite.driver import checkpoint, warm_start
from minite.driver.job import Job
from minite.driver.loop import Run
from minite.driver.metrics import MetricsWriter
from tests.driver.in_process import Learners, Samplers
from tests.driver.tiny_run import STRICT, config, lines

pytestmark = pytest.mark.slow
STEPS = 6
SETTINGS = (
    STRICT, f"driver.steps={STEPS}", "driver.checkpoint_every=1", f"driver.checkpoints_kept={STEPS}",
    "driver.eval_every=3", "data.heldout=3", "algo.prompts_per_step=2", "driver.num_cpus=4",
)  # fmt: skip
AHEAD = ("driver.placement=separate", "driver.ahead=1")
# What a step calls in turn; a cut comes before or after one of them. `write` is the line of metrics.jsonl.
MOMENTS = ("logprobs", "train_step", "export", "update", "collect", "write", "save")


class Cut(BaseException):
    """The end of a process, as far as its run can tell."""


class Cutter:
    """Lets ``left`` calls pass, then raises Cut, before the call or after it."""

    def __init__(self, left: int, after: bool) -> None:
        self.left, self.after, self.moment = left, after, ""

    def watch(self, patch: Any, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any) -> Any:
            self.left -= 1
            if self.left == 0:
                self.moment = f"{'after' if self.after else 'before'} {name}"
                if self.after:
                    original(*args)
                raise Cut
            return original(*args)

        patch.setattr(owner, name, call, raising=False)


@pytest.fixture(scope="module")
def learners():
    made = Learners()
    yield made
    made.close()


def go(folder: Path, learners: Learners, *settings: str, cutter: Cutter | None = None) -> bool:
    """Begin a run, or resume it, as the driver does, and whether it came to its end."""
    run_config = config(folder, *SETTINGS, *settings)
    job = Job(run_config, resolve_plan(run_config), folder)
    chosen = checkpoint.choose(folder, print)
    after_step = checkpoint.step_of(chosen) if chosen else -1
    with MetricsWriter(folder, job.view, after_step=after_step) as metrics, pytest.MonkeyPatch.context() as patch:
        warm_start.prepare(run_config, folder, learners, job.tokenizer, job.task.train, print)
        run = Run(job, learners, Samplers(run_config), metrics)
        if cutter is not None:
            owners = {"update": run.samplers, "collect": run.samplers, "write": metrics}
            for name in MOMENTS:
                cutter.watch(patch, owners.get(name, learners), name)
        try:
            run.restore(chosen) if chosen else run.begin()
            run.loop()
        except Cut:
            return False
    return True


def some_steps_back(folder: Path, rng: random.Random) -> None:
    """As if the newest checkpoints had not been."""
    for newer in checkpoint.list_checkpoints(folder)[rng.randint(1, 3) :]:
        shutil.rmtree(newer)


@pytest.mark.parametrize(("ahead", "seed"), [((), 1), (AHEAD, 2)], ids=["in turn", "one step ahead"])
def test_cut_at_five_random_moments(ahead, seed, learners, cache, tmp_path):
    rng = random.Random(seed)
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert go(whole, learners, *ahead)
    assert len({r["entropy/mean"] for r in lines(whole)[1:]}) == STEPS, "nothing was trained, so nothing is shown"
    moments: list[str] = []
    while len(moments) < 5:
        cutter = Cutter(rng.randint(2, 24), rng.random() < 0.5)
        if go(cut, learners, f"sampler.count={rng.randint(1, 3)}", *ahead, cutter=cutter):
            some_steps_back(cut, rng)
        else:
            moments.append(cutter.moment)
    print("cut", *moments, sep="; ")
    some_steps_back(cut, rng)
    assert go(cut, learners, "sampler.count=2", *ahead)
    assert lines(cut) == lines(whole)
