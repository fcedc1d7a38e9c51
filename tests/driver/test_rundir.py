"""The run directory, and what `train` and `resume` decide before anything runs."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from minite.config import resolve_plan
from minite.driver import checkpoint, job, loop, rundir
from minite.errors import UserError
from tests.driver.tiny_run import config, files


@pytest.fixture
def made(tmp_path):
    """A fresh run directory."""
    run_config = config(tmp_path)
    rundir.create(tmp_path / "run", run_config, resolve_plan(run_config))
    return tmp_path / "run"


def test_what_is_written_is_read_back(made, tmp_path):
    assert files(made) == ["config.json", "plan.json"]
    run_config, plan = rundir.load(made, ["learner.lr=0.25"])
    assert run_config == config(tmp_path, "learner.lr=0.25") and plan == resolve_plan(run_config)


def test_a_directory_with_something_in_it_is_refused(made, tmp_path):
    before = files(made)
    run_config = config(tmp_path)
    (tmp_path / "file").write_text("")
    for taken in (made, tmp_path / "file"):
        with pytest.raises(UserError, match=f"{taken} is not empty: go on with 'minite resume {taken}' or"):
            rundir.create(taken, run_config, resolve_plan(run_config))
    with pytest.raises(UserError, match="cannot be written"):
        rundir.create(tmp_path / "file" / "run", run_config, resolve_plan(run_config))
    assert files(made) == before


def test_precision_cannot_change_on_the_way(made):
    with pytest.raises(UserError, match="a run keeps its model and precision"):
        rundir.load(made, ["precision.alignment=strict"])


@pytest.mark.parametrize("name", ["config.json", "plan.json"])
def test_a_file_that_is_missing_or_damaged_is_named(made, name):
    (made / name).write_text("{")
    with pytest.raises(UserError, match=f"{name}: cannot be read"):
        rundir.load(made)
    (made / name).unlink()
    with pytest.raises(UserError, match=f"is not a run directory: no {name}"):
        rundir.load(made)


def test_a_mistyped_run_directory_names_the_nearest_run(made):
    with pytest.raises(UserError, match=f"nearest is '{made.name}'"):
        rundir.load(made.with_name(made.name + "x"))


def test_one_process_at_a_time(made):
    with rundir.locked(made), pytest.raises(UserError, match="another process is running it"), rundir.locked(made):
        pass
    with rundir.locked(made):
        pass


@pytest.mark.parametrize("error", [UserError("no"), KeyboardInterrupt(), ZeroDivisionError()])
@pytest.mark.parametrize("content", [None, "", '{"step": 0}\n'])
def test_a_run_that_ended_before_its_first_line_leaves_nothing(tmp_path, monkeypatch, error, content):
    def go(job, folder):
        if content is not None:
            (job.run_dir / "metrics.jsonl").write_text(content)
        raise error

    monkeypatch.setattr(loop, "_go", go)
    with pytest.raises(type(error)):
        loop.train(config(tmp_path), tmp_path / "deep" / "run")
    assert (tmp_path / "deep" / "run").exists() == bool(content)


def test_overrides_of_a_resume_hold_for_the_next_one(made, tmp_path, monkeypatch, capsys):
    seen = []
    monkeypatch.setattr(loop, "_go", lambda job, folder: seen.append((job.config, folder)))
    loop.resume(made, ["driver.steps=9"])
    loop.resume(made)
    assert seen == [(config(tmp_path, "driver.steps=9"), None)] * 2
    assert "resuming from the start: there is no checkpoint yet" in capsys.readouterr().out


def test_a_resume_that_cannot_start_changes_nothing(made):
    before = (made / "config.json").read_bytes()
    with pytest.raises(UserError, match="needs 3 CPUs, got 2"):
        loop.resume(made, ["sampler.count=3", "driver.num_cpus=2"])
    assert (made / "config.json").read_bytes() == before
    assert json.loads(before)["sampler"]["count"] == 1


@pytest.mark.parametrize(
    ("changes", "needed"),
    [((), 1), (("sampler.count=4",), 4), (("driver.placement=separate", "learner.tensor_parallel=2"), 3)],
)
def test_cpus_are_counted_by_placement(tmp_path, changes, needed):
    from minite.driver.cluster import find_slot

    share = 1.0 if "driver.placement=separate" in changes else 0.5
    assert find_slot(config(tmp_path, *changes, f"driver.num_cpus={needed}")).cpus == share
    if needed > 1:
        with pytest.raises(UserError, match=f"needs {needed} CPUs, got {needed - 1}: .*driver.num_cpus={needed}"):
            find_slot(config(tmp_path, *changes, f"driver.num_cpus={needed - 1}"))


def test_a_finished_run_says_so(made):
    checkpoint.write_checkpoint(made, 5, lambda folder: None, {})
    with pytest.raises(UserError, match=r"is finished \(5 of 5 steps\): raise it with -o driver.steps=N"):
        loop.resume(made)


def test_learner_and_sampler_must_compute_alike(tmp_path, monkeypatch):
    """On a machine with a GPU, a learner left on the CPU would be another backend than its sampler's."""
    run_config = config(tmp_path, "learner.device=cpu", "precision.backend=reference")
    assert job.Job(run_config, resolve_plan(run_config), tmp_path).backend.startswith("reference")
    monkeypatch.setattr(job, "use_cuda", lambda config, role: getattr(config, role).device != "cpu")
    with pytest.raises(UserError, match="alignment is aligned, but the learner .* on cpu and the sampler .* on cuda"):
        job.Job(run_config, resolve_plan(run_config), tmp_path)


def test_why_auto_took_no_better_backend_is_told(tmp_path):
    run_config = config(tmp_path, "learner.device=cpu", "sampler.device=cpu")
    made = job.Job(run_config, resolve_plan(run_config), tmp_path)
    assert made.backend == "cpu (emulated) on cpu"
    assert made.refused == [f"not {name}: runs on CUDA devices, not on cpu" for name in ("native", "triton")]
    run_config = config(tmp_path, "learner.device=cpu", "sampler.device=cpu", "precision.backend=reference")
    assert job.Job(run_config, resolve_plan(run_config), tmp_path).refused == []


def test_a_gpu_that_is_not_there_is_missed_by_the_setting_that_asks_for_it(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    run_config = config(tmp_path, "sampler.device=cuda")
    with pytest.raises(UserError, match="-o sampler.device=cuda: sampler.device is 'cuda', but torch sees no GPU here"):
        job.Job(run_config, resolve_plan(run_config), tmp_path)


STATE = {"step": 3, "weight_digest": "0", "plan_digest": "0", "triage": {}, "watch": {}, "rollouts": {}}


@pytest.mark.parametrize("alignment", ["aligned", "strict"])
def test_a_resume_on_another_backend_is_told_or_in_strict_refused(tmp_path, monkeypatch, capsys, alignment):
    """The plan says auto, so its digest is the same on every machine."""
    run_config = config(tmp_path, f"precision.alignment={alignment}", "learner.device=cpu", "sampler.device=cpu")
    run, plan = tmp_path / "run", resolve_plan(run_config)
    rundir.create(run, run_config, plan)
    here, started = job.Job(run_config, plan, run).backend, []
    monkeypatch.setattr(loop, "_go", lambda job, folder: started.append(folder.name))
    same = here.replace("cpu (", "reference (")  # the same numbers, compiled
    for backend in ({}, {"backend": here}, {"backend": same}):  # checkpoints of before do not say
        checkpoint.write_checkpoint(run, 3, lambda folder: None, STATE | backend)
        loop.resume(run)
    assert same != here and started == ["step_00000003"] * 3 and "was computed with" not in capsys.readouterr().out
    checkpoint.write_checkpoint(run, 3, lambda folder: None, STATE | {"backend": "triton (emulated) on cuda"})
    before = (run / "config.json").read_bytes()
    if alignment == "strict":
        with pytest.raises(UserError, match=r"with triton \(emulated\) on cuda, here it would go on with .* on cpu"):
            loop.resume(run, ["driver.steps=9"])
        assert len(started) == 3 and (run / "config.json").read_bytes() == before
    else:
        loop.resume(run)
        assert "computed with triton (emulated) on cuda, the run goes on with cpu" in capsys.readouterr().out


def test_shapes_that_the_machines_backend_cannot_take_are_said_before_anything_starts(tmp_path, monkeypatch):
    """backend: auto took native, as on a B200; the recipe alone could not know."""
    run_config = config(tmp_path, "model.hidden_size=48")
    monkeypatch.setattr(job, "get_backend", lambda *a, **k: SimpleNamespace(name="native", kind="native"))
    with pytest.raises(UserError, match="has K = 48, but 'nvfp4_1d' in the backend native needs a multiple of 32"):
        job.Job(run_config, resolve_plan(run_config), tmp_path)
