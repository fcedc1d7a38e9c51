"""Runs that are spread out otherwise: tensor and expert parallel learners, samplers of their own, one step ahead."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from urllib.request import urlopen

import pytest

from minite.config import resolve_plan
from minite.driver import checkpoint, loop, rundir
from minite.driver.actors import LearnerGroup
from minite.driver.exporters import gauge_name
from minite.driver.loop import Job, Run
from minite.driver.metrics import MetricsWriter
from minite.driver.samplers import SamplerPool
from minite.ports import free_port
from tests.driver.tiny_run import STRICT, config, lines

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
# FP32 storage: sums over ranks in another order then change the last digits and not the rounding to BF16.
FINE = (STRICT, "model.dtype=fp32", "driver.steps=3", "driver.num_cpus=2")
LAYOUTS = ["learner.tensor_parallel=2", "learner.expert_parallel=2"]


@pytest.fixture(scope="module")
def one(ray_cluster, cache, tmp_path_factory):
    """(directory, versions of the weights synced) of a run with one learner process."""
    folder = tmp_path_factory.mktemp("one")
    with pytest.MonkeyPatch.context() as patch:
        versions = record_versions(patch)
        loop.train(config(folder, *FINE), folder / "run")
    return folder / "run", versions


@pytest.fixture(scope="module")
def two_processes(ray_cluster, tmp_path_factory):
    """Made once for both layouts, which only `setup` decides."""
    job = _job(config(tmp_path_factory.mktemp("two"), *FINE, LAYOUTS[0]), tmp_path_factory.mktemp("unused"))
    return LearnerGroup(job.config, job.slot)


def _job(run_config, run_dir):
    return Job(run_config, resolve_plan(run_config), run_dir)


def record_versions(patch):
    seen, original = [], SamplerPool.update

    def update(self, buckets, version):
        told = original(self, buckets, version)
        seen.append(version)
        return told

    patch.setattr(SamplerPool, "update", update)
    return seen


@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_learner_processes_run_as_one_does(one, two_processes, layout, tmp_path, monkeypatch):
    run_dir, versions = one
    start = f"model.checkpoint={run_dir / rundir.START}"
    job = _job(config(tmp_path, *FINE, layout, start, "warm_start.steps=0"), tmp_path)
    seen = record_versions(monkeypatch)
    with MetricsWriter(tmp_path, job.view) as metrics:
        run = Run(job, two_processes, SamplerPool(job.config, job.slot, job.recovery, two_processes.export), metrics)
        run.begin()
        run.loop()
    # Unsharded bytes are those of one process, and samplers verified every sync.
    assert [v.step for v in seen] == [v.step for v in versions] == [0, 2, 4, 6]
    assert seen[0].weight_digest == versions[0].weight_digest
    expected, got = lines(run_dir), lines(tmp_path)
    for record in (*expected[1:], *got[1:]):
        del record["gap/corr_advantage"]  # of a gap that is rounding noise
    assert got[0] == expected[0]
    # Step 1 has the same weights and so the same rollout; sums over two ranks differ in order only, and Adam's first
    # update, which does not depend on a gradient's size, amplifies that where a gradient is nearly 0: minibatch 2.
    assert got[1] == pytest.approx(expected[1], rel=1e-3, abs=1e-6)
    exact = ("reward/", "response/", "rollout/", "triage/")
    assert {k: v for k, v in got[1].items() if k.startswith(exact)} == {
        k: v for k, v in expected[1].items() if k.startswith(exact)
    }
    assert got[1]["entropy/mean"] == pytest.approx(expected[1]["entropy/mean"], abs=1e-7)
    assert all(r["gap/abs_max"] <= 1e-8 for r in got[1:]), "strict holds across the sync of a split learner"
    assert got[1]["learner/grad_norm"] > 0


def test_a_checkpoint_of_one_learner_process_goes_on_with_two(one, two_processes, tmp_path):
    """Its weights have the digest that the checkpoint recorded, or `restore` would refuse them."""
    job = _job(config(tmp_path, *FINE, "learner.expert_parallel=2"), tmp_path)
    with MetricsWriter(tmp_path, job.view) as metrics:
        run = Run(job, two_processes, SamplerPool(job.config, job.slot, job.recovery, two_processes.export), metrics)
        run.restore(checkpoint.checkpoint_dir(one[0], 2))
        run.loop()
    (got,), expected = lines(tmp_path), lines(one[0])[3]
    for record in (got, expected):
        del record["gap/corr_advantage"]  # of a gap that is rounding noise
    assert got == pytest.approx(expected, rel=1e-3, abs=1e-6) and got["learner/grad_norm"] > 0


# One scale for all tokens of a call: the learner packs tokens in other company than the sampler, so there is a gap.
GAP = (
    "precision.formats.w4a4.input=nvfp4_tensor", "precision.alignment=off", "correction.calm=auto",
    "correction.limit_negative=5.0", "correction.limit_positive=5.0", "algo.kl_coef=0.01", "driver.steps=4",
)  # fmt: skip
AHEAD = ("driver.placement=separate", "driver.ahead=1", "driver.num_cpus=3", "sampler.count=2")


@pytest.fixture(scope="module")
def ahead(ray_cluster, cache, tmp_path_factory):
    """(directory, what its endpoint said) of a run whose samplers work while the learner trains, with a gap."""
    folder, port = tmp_path_factory.mktemp("ahead"), free_port()
    with pytest.MonkeyPatch.context() as patch:
        seen = record_scrapes(patch, port)
        loop.train(config(folder, *GAP, *AHEAD, f"driver.prometheus_port={port}"), folder / "run")
    return folder / "run", seen


def record_scrapes(patch, port):
    """What the endpoint says in the middle of each optimizer step."""
    seen, original = [], LearnerGroup.train_step

    def train_step(self, batch, *args):
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            seen.append(answer.read().decode())
        return original(self, batch, *args)

    patch.setattr(LearnerGroup, "train_step", train_step)
    return seen


def test_the_endpoint_of_a_run_says_what_its_file_says(ahead):
    run_dir, seen = ahead
    texts = [dict(line.split() for line in text.splitlines() if not line.startswith("#")) for text in seen]
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [float(text["minite_step"]) for text in texts] == [0, 0, 1, 1, 2, 2, 3, 3]  # two minibatches a step
    for text in texts:
        record = records[int(float(text["minite_step"]))]
        assert {gauge_name(key): value for key, value in record.items()}.items() <= {
            name: float(value) for name, value in text.items()
        }.items()


def test_a_rollout_ahead_lags_by_the_updates_of_one_step(ahead):
    assert [r["policy_lag/max"] for r in lines(ahead[0])[1:]] == [0, 2, 2, 2]  # two minibatches a step


def test_a_gap_is_measured_and_remembered(ahead):
    records = lines(ahead[0])[1:]
    assert all(r["gap/abs_max"] > 0 and r["loss/ref_kl"] >= 0 for r in records)
    assert len({r["triage/calm"] for r in records}) == 4
    assert records[-1]["loss/ref_kl"] > 0


def test_a_run_ahead_resumes_exactly(ahead, tmp_path, capsys):
    """The rollout that was waiting, the KL reference and the calm bound come back from the checkpoint of step 2."""
    run_dir = Path(shutil.copytree(ahead[0], tmp_path / "run"))
    shutil.rmtree(checkpoint.checkpoint_dir(run_dir, 4))
    loop.resume(run_dir)
    assert "resuming from step_00000002" in capsys.readouterr().out
    assert lines(run_dir) == lines(ahead[0])
