"""A recipe's reward function in its process: every way it can fail is named, and the next response is scored."""

from __future__ import annotations

import math
import os
import resource
import time
from contextlib import ExitStack
from types import SimpleNamespace

import psutil
import pytest
from metric_keys import undocumented

from minite.config.schema import DataConfig
from minite.driver import reward
from minite.driver.data import Example
from minite.driver.reward import BadReward, Scorer
from minite.driver.rollout import Rollouts
from minite.errors import UserError

FUNCTION = """
import os, time
print("imports may print")
def score(response, answer):
    print("so may functions")
    if response == "raise": raise ZeroDivisionError("no reward")
    if response == "hang": time.sleep(600)
    if response == "die": os._exit(3)
    if response == "text": return "high"
    return float(response) + float(answer)
"""


def ask(scorer, response, answer):
    return scorer(Example("?", answer, "?"), response)


@pytest.fixture
def scorer(tmp_path, monkeypatch):
    (tmp_path / "my_reward.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    made = Scorer(DataConfig(reward="my_reward.score", reward_timeout=2.0))
    yield made
    made.close()


def test_without_a_function_the_task_decides():
    assert ask(Scorer(DataConfig()), " 4", "4") == 1.0 and ask(Scorer(DataConfig()), "5", "4") == 0.0


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("raise", "ZeroDivisionError: no reward"),
        ("hang", "longer than 2 s"),
        ("die", "process died"),
        ("text", "ValueError"),
        ("nan", "returned nan"),
        ("inf", "returned inf"),
    ],
)
def test_a_failure_is_named_and_the_next_response_scored(scorer, response, reason):
    assert ask(scorer, "1", "2") == 3.0
    started = time.monotonic()
    with pytest.raises(BadReward, match=reason):
        ask(scorer, response, "2")
    assert time.monotonic() - started < 30
    assert ask(scorer, "\n1.5 ", "2") == 3.5 and math.isfinite(ask(scorer, "0", "0"))


def test_a_process_with_more_than_1024_open_files_scores(scorer):
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 2048:
        pytest.skip(f"this machine allows a process {most} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limit, 2048), most))
    scorer.close()
    with ExitStack() as held:
        held.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (limit, most))
        for _ in range(1100):
            held.enter_context(open(os.devnull))
        assert ask(scorer, "1", "2") == 3.0
        scorer.close()


def test_an_answer_that_a_tasks_own_scorer_does_not_outlive_is_wrong_and_counted(tmp_path, monkeypatch):
    """Stands for reasoning_gym's, which tests/driver/test_reasoning.py has where the package is."""
    (tmp_path / "my_reward.py").write_text(FUNCTION)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(reward, "SERVED", "my_reward.score")
    scorer = Scorer(DataConfig(kind="reasoning_gym", reward_timeout=1.0))
    assert [ask(scorer, response, "2") for response in ("1", "hang", "1", "die", "1")] == [3.0, 0.0, 3.0, 0.0, 3.0]
    told = Rollouts._ended(SimpleNamespace(_reward=scorer), "reward/ended")
    assert told == {"reward/ended": 2.0} and not undocumented([*told, "reward/ended_heldout"])
    assert Rollouts._ended(SimpleNamespace(_reward=scorer), "reward/ended") == {}
    scorer.close()


def test_nothing_is_left_running(scorer):
    child = psutil.Process(scorer._process.pid)
    scorer.close()
    assert not child.is_running()
    assert ask(scorer, "1", "1") == 2.0, "it starts again when it is asked"


@pytest.mark.parametrize(("name", "reason"), [("no_such.score", "ModuleNotFound"), ("my_reward.other", "Attribute")])
def test_a_function_that_is_not_there_is_a_mistake(scorer, name, reason):
    with pytest.raises(
        UserError, match=f"data.reward: {name} cannot be imported: {reason}.*looked for in {os.getcwd()}"
    ):
        Scorer(DataConfig(reward=name))
