"""One step ahead, whoever is slow: a rollout is sampled with the weights of the step before, and one at a time."""

from __future__ import annotations

import time

import pytest

from minite.config import resolve_plan
from minite.driver.job import Job
from minite.driver.loop import Run
from minite.driver.metrics import MetricsWriter
from tests.driver.in_process import Learners, Samplers
from tests.driver.tiny_run import config, lines

STEPS, MINIBATCHES = 4, 2
SETTINGS = (
    "driver.ahead=1", "driver.placement=separate", "driver.num_cpus=3", "sampler.count=2", "warm_start.steps=0",
    f"driver.steps={STEPS}", "data.heldout=1", f"algo.minibatches={MINIBATCHES}", "algo.max_resample=0",
)  # fmt: skip


class SlowLearners(Learners):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self._seconds = seconds

    def train_step(self, *args):
        time.sleep(self._seconds)
        return self._actor.call("train_step", *args)

    def save(self, *args) -> None:
        """Not what is looked at."""


class WatchedSamplers(Samplers):
    """Notes how many prompts are out when others are handed over."""

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.out, self.most = 0, 0

    def submit(self, groups):
        self.out += sum(not group[0].request_id.startswith("heldout") for group in groups)
        self.most = max(self.most, self.out)
        return super().submit(groups)

    def collect(self, shares):
        done = super().collect(shares)
        self.out -= len({c.request_id.split(".")[0] for c in done} - {"heldout"})
        return done


@pytest.mark.parametrize(("learner", "sampler"), [(0.3, 0.0), (0.0, 0.3)], ids=["slow learner", "slow sampler"])
def test_the_policy_lag_is_one_step_whoever_is_slow(learner, sampler, tmp_path):
    run_config = config(tmp_path, *SETTINGS)
    job = Job(run_config, resolve_plan(run_config), tmp_path)
    learners, samplers = SlowLearners(learner), WatchedSamplers(run_config, sampler)
    with MetricsWriter(tmp_path, job.view) as metrics:
        run = Run(job, learners, samplers, metrics)
        run.begin()
        run.loop()
    learners.close()
    assert [r["policy_lag/max"] for r in lines(tmp_path)[1:]] == [0.0] + [MINIBATCHES] * (STEPS - 1)
    assert samplers.most == run_config.algo.prompts_per_step, "one rollout at a time"
