"""Whole runs in strict mode: what they leave, and that a run stopped in any way goes on as if it had not been."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest

from minite.config import resolve_plan
from minite.diagnostics.report import write_report
from minite.driver import checkpoint, loop, rundir
from minite.driver.actors import LearnerGroup
from minite.driver.loop import Run
from minite.errors import ProcessDied, UserError
from tests.driver.faults import at_steps, full_disk, hang_sampler, kill_learner, kill_sampler
from tests.driver.metric_keys import undocumented
from tests.driver.tiny_run import STEPS, STRICT, config, files, left_running, lines, recipe, start

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]
MINIBATCHES = 2


@pytest.fixture
def trained(monkeypatch):
    """The prompts of every optimizer step, as they happen."""
    return record_prompts(monkeypatch)


def record_prompts(patch):
    seen, original = [], LearnerGroup.train_step

    def train_step(self, batch, *args):
        seen.append(batch.group_S.tolist())
        return original(self, batch, *args)

    patch.setattr(LearnerGroup, "train_step", train_step)
    return seen


@pytest.fixture(scope="module")
def whole(ray_cluster, cache, tmp_path_factory):
    """(directory, prompts of every optimizer step) of a run that nothing stopped."""
    folder = tmp_path_factory.mktemp("whole")
    with pytest.MonkeyPatch.context() as patch:
        seen = record_prompts(patch)
        loop.train(config(folder, STRICT), folder / "run")
    return folder / "run", seen


def test_a_run_leaves_settings_plan_metrics_and_checkpoints(whole, tmp_path):
    run_dir, _ = whole
    assert files(run_dir) == ["checkpoints", "config.json", "metrics.jsonl", "plan.json", "start"]
    assert files(run_dir / "checkpoints") == ["step_00000002", "step_00000004", "step_00000005"]
    read, plan = rundir.load(run_dir)
    assert read == config(tmp_path, STRICT)
    assert plan.digest == json.loads((run_dir / "plan.json").read_text())["digest"] == resolve_plan(read).digest


def test_one_line_a_step_with_documented_keys(whole):
    run_dir, _ = whole
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [record.pop("step") for record in records] == list(range(STEPS + 1))
    assert [undocumented(record) for record in records] == [[]] * (STEPS + 1)
    wanted = "reward/mean accuracy/heldout gap/abs_mean gap/abs_max gap/p99 gap/p1 entropy/mean ratio/ess"
    phases = "rollout logprob train sync eval step"
    for record in records[1:]:
        assert not set(wanted.split()) - set(record)
        assert not {f"time/{phase}" for phase in phases.split()} - set(record)


def test_training_moves_the_policy(whole):
    """Without gradients and mixed rewards the equalities below would say nothing."""
    records = lines(whole[0])[1:]
    assert all(0 < r["reward/mean"] < 1 and r["learner/grad_norm"] > 0 for r in records)
    assert len({r["entropy/mean"] for r in records}) == STEPS
    digests = {checkpoint.read_state(f)["weight_digest"] for f in checkpoint.list_checkpoints(whole[0])}
    assert len(digests) == 3


def test_strict_mode_leaves_no_gap(whole):
    assert all(r["gap/abs_max"] <= 1e-8 and r["gap/nonfinite"] == 0 for r in lines(whole[0])[1:])


def test_each_prompt_is_trained_on_once(whole):
    run_dir, seen = whole
    assert len(seen) == STEPS * MINIBATCHES
    prompts = [prompt for step in seen for prompt in sorted(set(step))]
    assert len(prompts) == len(set(prompts)) == STEPS * 4
    counts = checkpoint.read_state(checkpoint.checkpoint_dir(run_dir, STEPS))["rollouts"]["buffer"]
    assert counts["issued"] == counts["trained"] + counts["dropped"] == counts["last_id"] + 1
    assert counts["trained"] == STEPS * 4


def test_report_of_a_run(whole, tmp_path):
    shutil.copytree(whole[0], tmp_path / "run")
    page = write_report(tmp_path / "run").read_text()
    assert page.startswith("<!") and "reward" in page and "http" not in page.replace("http://www.w3.org", "")


def test_a_killed_run_goes_on_exactly(whole, trained, tmp_path, capsys):
    """SIGKILL between the optimizer's step and the sync of step 4; the newest checkpoint is that of step 2."""
    run_dir, seen = whole
    killed = start(tmp_path / "work", "tests.driver.killed_run", str(4 * MINIBATCHES), "train",
                   str(recipe(tmp_path)), "-o", STRICT, "--run-dir", "run")  # fmt: skip
    _, errors = killed.communicate(timeout=500)
    assert (killed.returncode, errors) == (-signal.SIGKILL, "")
    assert left_running(tmp_path / "work") == []
    stopped = tmp_path / "work" / "run"
    assert lines(stopped) == lines(run_dir)[:4]
    loop.resume(stopped)
    assert "resuming from step_00000002" in capsys.readouterr().out
    assert lines(stopped) == lines(run_dir)
    before = [json.loads(line) for line in (tmp_path / "work" / "trained.jsonl").read_text().splitlines()]
    assert before == seen[: 4 * MINIBATCHES]
    assert before[: 2 * MINIBATCHES] + trained == seen
    assert files(stopped) == files(run_dir) and files(stopped / "checkpoints") == files(run_dir / "checkpoints")


def test_a_run_outlives_its_processes(whole, trained, tmp_path, monkeypatch, capsys):
    """A sampler dies at work, one hangs, the learner dies, a sync finds its sampler dead, a checkpoint finds the disk
    full: nothing of it shows in the metrics, but that it was repaired."""
    faults = {
        ("submit", 1): kill_sampler,
        ("update", 1): kill_sampler,
        ("save", 2): full_disk,
        ("submit", 3): hang_sampler,  # for the held-out check after step 2
        ("train_step", 5): kill_learner,
    }
    happened = at_steps(monkeypatch, faults)
    loop.train(config(tmp_path, STRICT), tmp_path / "run")
    assert sorted(happened) == sorted(faults)
    records = lines(tmp_path / "run")
    counted = [{k: r.pop(k) for k in list(r) if k.startswith("recovery/") and k != "recovery/seconds"} for r in records]
    assert [r.pop("recovery/seconds", 0) > 0 for r in records] == [False, True, True, False, False, True]
    restarts, missed = "recovery/sampler_restarts", "recovery/checkpoints_failed"
    assert counted == [{}, {restarts: 2}, {restarts: 1}, {missed: 1}, {}, {"recovery/restarts": 1}]
    assert [undocumented(counts) for counts in counted] == [[]] * (STEPS + 1)
    assert records == lines(whole[0])
    assert (
        trained[: 4 * MINIBATCHES] == whole[1][: 4 * MINIBATCHES] and trained[-MINIBATCHES:] == whole[1][-MINIBATCHES:]
    )
    assert files(tmp_path / "run" / "checkpoints") == ["step_00000003", "step_00000004", "step_00000005"]
    said = capsys.readouterr().out
    assert "a sampler process died" in said and "did not answer within 1 s (driver.timeout)" in said
    assert "No space left on device; earlier checkpoints are intact" in said and "going on from step_00000004" in said


def test_a_run_stops_after_too_many_repairs(whole, tmp_path, monkeypatch):
    monkeypatch.setattr(Run, "train_step", lambda run: kill_learner(run) or run.learners.export())
    run_dir = Path(shutil.copytree(whole[0], tmp_path / "run"))
    with pytest.raises(ProcessDied, match="a learner process died"):
        loop.resume(run_dir, ["driver.steps=6", "driver.retries=1"])
    assert lines(run_dir) == lines(whole[0])


def test_damaged_checkpoints_are_named_and_an_older_one_taken(whole, tmp_path, capsys):
    """With a second sampler, which must not change a line either."""
    run_dir = Path(shutil.copytree(whole[0], tmp_path / "run"))
    data = next(checkpoint.checkpoint_dir(run_dir, 5).glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    (checkpoint.checkpoint_dir(run_dir, 4) / "state.json").unlink()
    loop.resume(run_dir, ["sampler.count=2"])
    said = capsys.readouterr().out
    assert f"step_00000005: {data.name} differs from its SHA-256; skipped" in said
    assert "step_00000004: state.json is missing; skipped" in said and "resuming from step_00000002" in said
    assert lines(run_dir) == lines(whole[0])
    assert checkpoint.newest_valid(run_dir) == (checkpoint.checkpoint_dir(run_dir, STEPS), [])


def test_a_run_without_any_whole_checkpoint_is_refused_and_untouched(whole, tmp_path):
    run_dir = Path(shutil.copytree(whole[0], tmp_path / "run"))
    for folder in checkpoint.list_checkpoints(run_dir):
        (folder / "MANIFEST.json").unlink()
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        loop.resume(run_dir)
    assert lines(run_dir) == lines(whole[0])
