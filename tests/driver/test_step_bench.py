"""The step benchmark on a run of seconds."""

from __future__ import annotations

import re

import pytest

from minite.driver import loop
from minite.driver.bench import PHASES, measure_steps, step_table
from tests.driver.tiny_run import config

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]


def test_recipe_and_twin_take_steps_in_turns(ray_cluster, tmp_path, monkeypatch):
    order, original = [], loop.Run.train_step

    def train_step(run):
        order.append(next(e.weight for e in run.plan.entries if e.name.endswith("q_proj")))
        original(run)

    monkeypatch.setattr(loop.Run, "train_step", train_step)
    times = measure_steps(config(tmp_path), turns=1)
    assert order == ["bf16", "nvfp4_1d", "nvfp4_1d", "bf16"]
    for phases in (times.recipe, times.bf16):
        assert list(phases) == list(PHASES) and min(phases.values()) > 0
        assert sum(phases[p] for p in PHASES[:-1]) <= 1.5 * phases["step"]  # medians of parts and of the whole
    rows = step_table(times).splitlines()[2:]
    assert [row.split()[0] for row in rows] == list(PHASES)
    assert all(re.fullmatch(r"\w+ +[\d.]+ +[\d.]+ +[\d.]+", row) for row in rows)
