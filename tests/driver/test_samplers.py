"""The pool of samplers without Ray: who is replaced, with which weights, and what is done again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from ray.exceptions import ObjectStoreFullError

from minite.config import resolve_plan
from minite.driver import samplers
from minite.driver.actors import LearnerGroup, Lost
from minite.driver.cluster import Slot
from minite.driver.recovery import Recovery
from minite.errors import ProcessDied
from minite.sampler.engine import Request, SamplingParams
from minite.sync.errors import SyncError
from minite.types import WeightVersion
from tests.driver.tiny_run import config

PARAMS = SamplingParams(4)


class Actor:
    """Fails with what ``failures`` holds for its next calls of a method; says what it was asked."""

    made: list[Actor] = []
    failures: dict[tuple[int, str], Exception] = {}

    def __init__(self):
        self.number, self.held, self.killed = len(self.made), None, False
        self.made.append(self)

    def __getattr__(self, name):
        return SimpleNamespace(remote=lambda *args: self.call(name, *args))

    def call(self, name, *args):
        if (failure := self.failures.get((self.number, name))) and isinstance(failure, ObjectStoreFullError):
            raise failure  # at once, where the arguments do not fit
        return lambda: self.answer(name, *args)

    def answer(self, name, *args):
        failure = self.failures.pop((self.number, name), None)
        if self.killed or failure is not None:
            raise failure or ProcessDied("killed")
        if name == "update":
            self.held = args[1].step
            return {"load": float(self.number)}
        if name == "generate":
            return [SimpleNamespace(request_id=r.request_id, step=self.held, by=self.number) for r in args[0]]
        return name


def version(step):
    return WeightVersion(step, "plan", f"weights {step}")


@pytest.fixture
def pool(tmp_path, monkeypatch):
    """Two samplers that hold the weights of step 1; the learner's are ``pool.newest``."""
    Actor.made, Actor.failures = [], {}
    monkeypatch.setattr(samplers, "ray", SimpleNamespace(remote=lambda **_: lambda _: SimpleNamespace(remote=Actor)))
    monkeypatch.setattr(samplers, "processes", lambda pids, kind: list(pids))
    monkeypatch.setattr(samplers, "answers", lambda refs, kind, timeout: [ref() for ref in refs])
    monkeypatch.setattr(samplers, "end", lambda actors, _: [setattr(a, "killed", True) for a in actors])
    run_config = config(tmp_path, "sampler.count=2")
    recovery = Recovery(2, lambda _: None)
    made = samplers.SamplerPool(run_config, Slot(1, 0, 0, 1), recovery, lambda: ([], made.newest, {}))
    made.use_plan(resolve_plan(run_config))
    made.recovery, made.newest = recovery, version(1)
    made.update([], version(1))
    return made


def groups(*names):
    return [[Request(f"{name}.{i}", (1,), PARAMS) for i in range(2)] for name in names]


def test_a_sampler_that_dies_at_work_is_replaced_and_only_its_share_done_again(pool):
    Actor.failures[0, "generate"] = ProcessDied("killed")
    shares = pool.submit(groups("a", "b", "c"))
    done = pool.collect(shares)
    assert [c.request_id for c in done] == ["a.0", "a.1", "b.0", "b.1", "c.0", "c.1"]
    assert [c.by for c in done] == [2, 2, 1, 1, 2, 2] and {c.step for c in done} == {1}
    assert pool.recovery.take_metrics().pop("recovery/sampler_restarts") == 1
    assert Actor.made[0].killed and not Actor.made[1].killed


def test_a_dead_sampler_is_replaced_once_however_many_calls_it_failed(pool):
    """With a rollout ahead the sync sees the death first; the rollout's share is then sampled with the new weights."""
    shares = pool.submit(groups("a", "b"))
    Actor.made[1].killed = True
    pool.newest = version(2)
    pool.update([], version(2))
    done = [(pool.collect([share]), share.weight_step) for share in shares]
    assert [(c.by, c.step, step) for part, step in done for c in part] == [(0, 2, 1)] * 2 + [(2, 2, 2)] * 2
    assert pool.recovery.take_metrics()["recovery/sampler_restarts"] == 1 and len(Actor.made) == 3


def test_a_sampler_replaced_between_update_and_sync_says_which_weights_it_has(pool):
    shares = pool.submit(groups("a", "b"))
    Actor.made[0].killed = True
    pool.newest = version(2)  # the learner has trained; the sync is still to come
    pool.collect(shares)
    assert [share.weight_step for share in shares] == [2, 1]


def test_wrong_bytes_are_sent_again_once(pool):
    Actor.failures[1, "update"] = SyncError("q_proj differs")
    assert pool.update([], version(2)) == {"load": 1.0}, "the slowest's seconds"
    assert [a.held for a in Actor.made] == [2, 2]
    assert pool.recovery.take_metrics()["recovery/resyncs"] == 1


def test_a_sampler_that_always_dies_ends_the_run(pool):
    Actor.failures |= {(i, "update"): ProcessDied("out of memory") for i in (0, 2, 3, 4)}
    with pytest.raises(ProcessDied, match="out of memory"):
        pool.update([], version(2))
    assert len(Actor.made) == 4, "two repairs"


def test_a_plan_that_the_object_store_does_not_take_is_lost_data(pool):
    """A new sampler would not mend it; a new start of everything empties the store."""
    Actor.failures |= {(0, "update"): ProcessDied("killed"), (2, "setup"): ObjectStoreFullError("full")}
    with pytest.raises(Lost, match="the precision plan cannot be shared"):
        pool.update([], version(2))


def test_arguments_of_a_learner_that_the_object_store_does_not_take_are_lost_data():
    def full(*_):
        raise ObjectStoreFullError("full")

    learners = LearnerGroup.__new__(LearnerGroup)
    learners._ranks, learners._timeout = [SimpleNamespace(call=SimpleNamespace(remote=full))], 1.0
    with pytest.raises(Lost, match="the arguments of a call cannot be shared"):
        learners.use_plan(None)


def test_lost_data_is_not_the_samplers_fault(pool):
    Actor.failures[0, "update"] = Lost("the learner is gone")
    with pytest.raises(Lost):
        pool.update([], version(2))
    assert len(Actor.made) == 2
