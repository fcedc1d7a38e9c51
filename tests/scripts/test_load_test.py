"""scripts/load_test.py with small counts; its full ones take minutes each, see docs/results.md."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    sys.modules.pop("load_test", None)


def recipe():
    from load_test import RECIPE

    from minite.config import load_recipe

    return load_recipe(RECIPE)


def test_every_request_comes_back_and_the_cache_is_empty() -> None:
    from load_test import requests

    outcome = requests(recipe(), 400, seed=3)
    assert outcome.wrong == [] and len(outcome.memory["engine"]) == 20
    ended = {reason: int(number) for number, reason in (part.split() for part in outcome.said.split(", "))}
    assert sum(ended.values()) == 400 and all(ended[reason] > 10 for reason in ("abort", "stop", "length"))


def test_a_lost_request_and_a_leaked_range_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    import load_test

    from minite.sampler.embedded import EmbeddedEngine
    from minite.sampler.embedded.kv_cache import Ranges

    complete, give = EmbeddedEngine._complete, Ranges.give

    def wrong(self, sequence):
        completion = complete(self, sequence)
        if sequence.request.request_id == "r7":
            completion.request_id = "r8"
        return completion

    monkeypatch.setattr(EmbeddedEngine, "_complete", wrong)
    monkeypatch.setattr(Ranges, "give", lambda self, start, length: give(self, start, length) if start else None)
    outcome = load_test.requests(recipe(), 40, seed=0)
    said = " ".join(outcome.wrong)
    assert "r7 came back as r8" in said and "KV tokens are used after all" in said and "not one free range" in said


def test_every_sync_is_held_as_it_was_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    import load_test

    outcome = load_test.syncs(recipe(), 25, seed=1)
    assert outcome.wrong == [] and outcome.said == "25 different weights held"
    ship = load_test.ship
    monkeypatch.setattr(load_test, "ship", lambda engine, config, seed: ship(engine, config, min(seed, 27)))
    assert load_test.syncs(recipe(), 5, seed=5).wrong == ["2 different weights held"]


def test_a_leak_is_told_and_the_start_does_not_count() -> None:
    from load_test import Outcome, slope, table

    warm_up = [(i, 1 << 20) if i < 25 else (i, (1 << 20) + (50 << 20)) for i in range(100)]
    leaking = [(i, (1 << 20) + 6 * 1024 * i) for i in range(100)]
    assert abs(slope(warm_up)) < 1e-9 and slope(leaking) == pytest.approx(6.0)
    outcome = Outcome("steps", 100, memory={"driver": warm_up, "learner": leaking, "sampler": []})
    outcome.check_memory()
    assert outcome.wrong == ["learner grows by 6.00 KiB each, at most 4 allowed", "sampler was never seen"]
    assert [line.split()[-3:] for line in table([outcome]).splitlines()[2:3]] == [["1.6", "6.000", "4"]]


@pytest.mark.slow
def test_a_short_run_is_watched_from_outside() -> None:
    from load_test import steps

    outcome = steps(12, [])
    assert outcome.wrong == [] and outcome.said == "13 lines of metrics"
    assert all(samples and samples[-1][0] <= 12 for samples in outcome.memory.values())
