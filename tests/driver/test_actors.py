"""The processes of a run: verified sync, what their failures look like to the driver, the warm start they make."""

from __future__ import annotations

import dataclasses
import re
import time

import pytest
import ray
import torch

from minite.config import load_recipe, resolve_plan
from minite.driver import actors, checkpoint, rundir, warm_start
from minite.driver.actors import LearnerGroup
from minite.driver.loop import Job, Run
from minite.driver.metrics import MetricsWriter
from minite.driver.samplers import SamplerPool
from minite.errors import ProcessDied, UserError
from minite.sync.errors import SyncError
from minite.sync.flat import flatten, unflatten
from minite.sync.transport import from_wire
from minite.sync.verify import compare
from tests.driver.tiny_run import STRICT, config, files, recipe

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    return Job(*_resolved(config(tmp_path_factory.mktemp("recipe"), STRICT)), tmp_path_factory.mktemp("run"))


def _resolved(run_config):
    return run_config, resolve_plan(run_config)


@pytest.fixture(scope="module")
def learners(ray_cluster, cache, job):
    return LearnerGroup(job.config, job.slot)


@pytest.fixture(scope="module")
def run(learners, job):
    with MetricsWriter(job.run_dir, job.view) as metrics:
        yield Run(job, learners, SamplerPool(job.config, job.slot, job.recovery, learners.export), metrics)


def _prepare(job, learners, folder, changes=(), **warm):
    """(lines said, weights by name) of a warm start."""
    said = []
    folder.mkdir()
    run_config = load_recipe(recipe(folder / "recipe"), [STRICT, *changes])
    run_config = dataclasses.replace(run_config, warm_start=dataclasses.replace(run_config.warm_start, **warm))
    warm_start.prepare(run_config, folder, learners, job.tokenizer, job.task.train, said.append)
    assert files(folder) == ["recipe", "start"]
    learners.setup(job.config, job.plan)
    learners.load_hf(folder / rundir.START)
    buckets, _, _ = learners.export()
    sent = map(unflatten, ray.get(buckets))
    return said, {name: tensor for bucket in sent for name, tensor in from_wire(bucket).items()}


def test_a_warm_start_is_the_same_made_or_from_the_cache(job, learners, tmp_path, monkeypatch):
    monkeypatch.setenv("MINITE_CACHE_DIR", str(tmp_path / "cache"))
    made_said, made = _prepare(job, learners, tmp_path / "a")
    kept_said, kept = _prepare(job, learners, tmp_path / "b")
    alone_said, alone = _prepare(job, learners, tmp_path / "c", cache=False)
    assert kept_said == ["warm start: taken from the cache"]
    assert len(made_said) == 6 and made_said == alone_said and "step 12 of 12, loss" in made_said[-1]
    assert compare(made, kept) is None and compare(made, alone) is None


def test_recipes_that_differ_in_precision_or_rate_share_a_warm_start(job, learners, tmp_path):
    _, first = _prepare(job, learners, tmp_path / "a")
    changes = ["precision.alignment=off", "precision.formats.w4a4.input=bf16", "learner.lr=0.5", "algo.group_size=2"]
    said, second = _prepare(job, learners, tmp_path / "b", changes)
    assert said == ["warm start: taken from the cache"] and compare(first, second) is None


@pytest.mark.parametrize("change", ["seed=1", "warm_start.lr=1e-3", "model.init_std=0.2", "learner.weight_decay=0.5"])
def test_what_decides_the_weights_is_in_the_key_of_the_warm_start(job, tmp_path, change):
    changed = config(tmp_path, STRICT, change)
    args = job.tokenizer, job.task.train
    assert warm_start._key(changed, *args) != warm_start._key(job.config, *args)


def test_the_examples_themselves_are_in_the_key_of_the_warm_start(job):
    first, *rest = job.task.train
    changed = [dataclasses.replace(first, answer=first.answer + "1"), *rest]
    keys = {warm_start._key(job.config, job.tokenizer, examples) for examples in (job.task.train, changed)}
    assert len(keys) == 2


def test_a_tampered_bucket_stops_the_run_and_names_the_tensor(run):
    buckets, version, _ = run.learners.export()
    whole = [unflatten(bucket) for bucket in ray.get(buckets)]
    name = next(n for n in whole[0] if n.endswith("experts.0.down_proj.weight"))
    whole[0][name] = whole[0][name].clone()
    whole[0][name].view(torch.uint8)[0, 0] ^= 1
    with pytest.raises(SyncError, match=re.escape(name)):
        run.samplers.update([ray.put(flatten(bucket)) for bucket in whole], version)
    request = run.rollouts._requests(run.rollouts._stream._at(0))
    with pytest.raises(SyncError, match="refusing to generate"):
        run.samplers.collect(run.samplers.submit([request]))
    run.samplers.update(buckets, version)
    assert len(run.samplers.collect(run.samplers.submit([request]))) == run.config.algo.group_size


def test_weights_of_another_plan_are_refused(run):
    buckets, version, _ = run.learners.export()
    with pytest.raises(SyncError, match="another precision plan"):
        run.samplers.update(buckets, dataclasses.replace(version, plan_digest="other"))


def test_completions_are_in_the_order_of_their_requests(run):
    run._sync()
    groups = [run.rollouts._requests(run.rollouts._stream._at(i)) for i in range(3)]
    completions = run.samplers.collect(run.samplers.submit(groups[::-1]))
    assert [c.request_id for c in completions] == [r.request_id for group in groups for r in group]


def test_entropy_stays_what_it_was_before_the_update(run, monkeypatch):
    """With an entropy bonus the learner reports an entropy too; the two must not be added up."""
    run._sync()
    run.values = {"entropy/mean": 0.5}
    done = {"entropy/mean": 0.25, "loss/policy": 3.0, "learner/skipped_steps": 0.0}
    monkeypatch.setattr(run.learners, "train_step", lambda *_: done)
    run._optimize(run.rollouts.next().batch)
    assert run.values == done | {"entropy/mean": 0.5}


def test_a_skipped_update_is_counted_named_and_has_no_part_in_the_means(run, monkeypatch, capsys):
    run._sync()
    run.values = {}
    skipped, done = {"learner/skipped_steps": 1.0}, {"learner/skipped_steps": 0.0, "learner/grad_norm": 3.0}
    updates = iter([skipped, done, skipped])
    monkeypatch.setattr(run.learners, "train_step", lambda *_: next(updates))
    monkeypatch.setattr(run.learners, "unsound_gradients", lambda: ["a.weight", "b.weight"])
    batch = run.rollouts.next().batch
    run._optimize(batch)
    assert run.values == {"learner/skipped_steps": 1.0, "learner/grad_norm": 3.0}
    line = f"step {run.step + 1}: the gradient of a.weight and of 1 more is not finite; "
    assert line + "skipped, as learner.bad_gradient says" in capsys.readouterr().out
    learner = dataclasses.replace(run.config.learner, bad_gradient="stop")
    monkeypatch.setattr(run, "config", dataclasses.replace(run.config, learner=learner))
    with pytest.raises(UserError, match=line + "stopped as learner.bad_gradient says"):
        run._optimize(batch)


@pytest.mark.parametrize(("choice", "steps"), [("warn", 1), ("skip", 0)])
def test_an_unhealthy_step_is_trained_on_or_skipped(run, monkeypatch, capsys, choice, steps):
    _make_unhealthy(run, monkeypatch, choice)
    trained = []
    monkeypatch.setattr(run, "_optimize", trained.append)
    run.train_step()
    assert len(trained) == steps
    assert "were dropped, more than" in capsys.readouterr().out


def test_an_unhealthy_step_stops_the_run(run, monkeypatch):
    _make_unhealthy(run, monkeypatch, "stop")
    with pytest.raises(UserError, match="minite resume"):
        run.train_step()


def _make_unhealthy(run, patch, choice):
    correction = dataclasses.replace(run.config.correction, max_dropped_frac=-1.0, unhealthy=choice)
    patch.setattr(run, "config", dataclasses.replace(run.config, correction=correction))
    run._sync()


def test_weights_other_than_those_saved_are_refused(run, tmp_path, monkeypatch):
    """A checkpoint that verifies but restores to other weights, as after a change of the code."""
    run._sync()
    state = run._state() | {"weight_digest": "0" * 32}
    folder = checkpoint.write_checkpoint(tmp_path, 0, run.learners.save, state)
    with pytest.raises(UserError, match="its weights have digest .*, it was written with 000"):
        run.restore(folder)


def test_a_mistake_found_by_an_actor_comes_back_as_it_is(run, tmp_path):
    with pytest.raises(UserError, match=r"has no \*.safetensors file"):
        run.learners.load_hf(tmp_path)


def test_a_defect_in_an_actor_keeps_its_traceback(run):
    with pytest.raises(ray.exceptions.RayTaskError, match="(?s)actors.py.*AttributeError.*no_such_method"):
        run.learners._call("no_such_method")


def test_the_cause_is_told_and_not_its_echo_in_another_rank(ray_cluster):
    class Rank:  # in here, so that it travels to the actor as code
        def work(self, seconds, error):
            time.sleep(seconds)
            if error is not None:
                raise error

    first, second = (ray.remote(num_cpus=0)(Rank).remote() for _ in range(2))
    echo = RuntimeError("connection closed")
    ray.get([first.work.remote(0, None), second.work.remote(0, None)])
    with pytest.raises(UserError, match="the cause"):
        actors.answers([first.work.remote(0, echo), second.work.remote(1, UserError("the cause"))], "learner", 60)
    calls = [first.work.remote(0, echo), second.work.remote(60, None)]
    ray.kill(second)
    with pytest.raises(ProcessDied, match="a learner process died"):
        actors.answers(calls, "learner", 60)


def test_a_sampler_whose_server_is_broken_counts_as_dead(ray_cluster):
    """So it is replaced and its work done again."""
    error = ProcessDied("SGLang's server died (exit code -9), noticed at /generate")
    assert actors._explain(ray.exceptions.RayTaskError("generate", "", error), [], "sampler") is error
