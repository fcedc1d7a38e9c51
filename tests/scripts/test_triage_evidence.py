"""The scripts of the TRIAGE evidence: placebo, statistics, collapse, the toy's controls, and a run that is resumed."""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minite.losses.tokens import loss_tokens
from minite.losses.triage import push_on_gap

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts import each other by their bare names, as they do when they are run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in [name for name in sys.modules if name.startswith("triage_")]:
        del sys.modules[name]


def batch(seed: int, responses: int = 6, length: int = 9):
    generator = torch.Generator().manual_seed(seed)
    count = responses * length
    old, sampler = (torch.randn(2, count, generator=generator)).unbind()
    advantage = torch.tensor([1.0, -1.0, 0.0]).repeat(responses)[:responses].repeat_interleave(length)
    mask = torch.rand(count, generator=generator) < 0.8
    return loss_tokens(old, sampler, advantage, mask, torch.arange(responses).repeat_interleave(length))


def test_the_placebo_keeps_each_response_its_weights_and_moves_only_pushed_tokens() -> None:
    from triage_placebo import shuffled

    tokens = batch(0)
    weight = torch.rand(tokens.num_tokens)
    mixed = shuffled(weight, tokens, torch.Generator().manual_seed(1))
    pushed = push_on_gap(tokens) > 0
    assert torch.equal(mixed[~pushed], weight[~pushed])
    assert not torch.equal(mixed, weight)
    for response in tokens.response_N.unique():
        mine = tokens.response_N == response
        assert torch.equal(mixed[mine].sort().values, weight[mine].sort().values)


def test_interval_is_that_of_student() -> None:
    from triage_stats import interval, words

    mean, half = interval([1.0, 2.0, 3.0, 4.0, 5.0])
    assert mean == 3.0 and half == pytest.approx(2.776 * math.sqrt(2.5 / 5))
    assert math.isnan(interval([1.0])[1])
    assert words((0.5, 0.25), sign="+") == "+0.500 +- 0.250" and words(None) == ""


def test_collapse_is_the_first_fall_below_the_best() -> None:
    from triage_table import collapse_step

    def step(*rewards: float) -> float:
        return collapse_step([{"step": 25 * i, "reward/mean": reward} for i, reward in enumerate(rewards, 1)])

    assert step(0.1, 0.9, 0.9) == 0
    assert step(0.8, 0.8, 0.0, 0.0) == 75
    assert step(0.8, 0.7, 0.6) == 0 and step(0.8, 0.7, 0.55) == 75


def test_the_table_pairs_seeds_and_names_the_cost_of_the_mismatch(tmp_path: Path) -> None:
    from triage_cases import TAIL
    from triage_table import report

    keys = ("entropy/mean", "gap/abs_mean", "gap/p0.1", "ratio/ess", "learner/grad_norm", TAIL)

    def line(precision: str, arm: str, seed: int, step: int, reward: float) -> str:
        who = {"precision": precision, "correction": arm, "seed": seed, "steps": 60, "step": step}
        return json.dumps(who | {"reward/mean": reward} | dict.fromkeys(keys, 0.0)) + "\n"

    reward = {("unaligned", "none"): 0.5, ("unaligned", "triage"): 0.7, ("aligned", "none"): 0.9}
    text = line("unaligned", "none", 0, 20, 0.0)  # of a run that was stopped and wrote this step again
    for (precision, arm), value in reward.items():
        for seed in range(2):
            for step in (20, 40, 60):
                text += line(precision, arm, seed, step, value + 0.01 * seed)
    text += line("bf16", "none", 0, 20, 0.5)
    path = tmp_path / "results.jsonl"
    path.write_text(text + '{"precision": "bf16", "corr')  # killed while it wrote
    said = report(path)
    assert "| unaligned | triage | 2 | 0 | 0.705 +- 0.064 | +0.200 +- 0.000 | 0.705" in said
    assert "unaligned, none, minus aligned, none (what the mismatch costs): -0.400 +- 0.000" in said
    assert "shorter than 60 steps: bf16/none/seed0 (20)" in said
    assert "unaligned, none, minus bf16, none (what the mismatch costs): +0.0" in report(path, 20)
    assert report(tmp_path / "none").endswith("no results yet")


def test_seeds_come_one_after_the_other_and_controls_have_no_correction(tmp_path: Path) -> None:
    from triage_evidence import make_jobs

    args = SimpleNamespace(
        out=tmp_path, work=None, corrections="none,triage", precisions="aligned,unaligned", first_seed=3, seeds=2,
        steps=5, sync_every=1, checkpoint_every=1, device="cpu", overrides=[],
    )  # fmt: skip
    names = [job.name for job in make_jobs(args)]
    first = ["aligned/none/seed3", "unaligned/none/seed3", "unaligned/triage/seed3"]
    assert names == first + [name.replace("seed3", "seed4") for name in first]


def test_the_runs_import_no_ray() -> None:
    code = "import sys, triage_run; assert not {'ray', 'rich'} & set(sys.modules)"
    subprocess.run(
        [sys.executable, "-c", code], check=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": f"{ROOT}:{SCRIPTS}"}
    )


def test_the_toy_has_no_gap_without_a_mismatch_and_triage_keeps_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    import triage_toy

    short = replace(triage_toy.POLICIES["table"], steps=40)
    curves = {name: triage_toy.train(short, name, 2, 20) for name in ("no mismatch", "none", "triage")}
    assert max(abs(x) for point in curves["no mismatch"] for x in point["gap p0.1"]) == 0.0
    tail = {name: sum(curve[-1]["gap p0.1"]) / 2 for name, curve in curves.items()}
    assert tail["none"] < 2 * tail["triage"] < -0.5  # -4 against -0.6; without TRIAGE it goes on growing
    assert triage_toy.row("none", curves["none"], None).startswith("| none | ")


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_as_if_it_had_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import triage_run
    from triage_cases import write_questions
    from triage_run import Job, go, read_metrics
    from triage_table import read_results

    data = tmp_path / "questions.jsonl"
    write_questions(data, count=200)
    small = ("warm_start.steps=2", "warm_start.batch_size=8", "algo.prompts_per_step=4", "learner.device=cpu",
             "sampler.device=cpu", "learner.warmup_steps=0")  # fmt: skip
    monkeypatch.setattr(triage_run, "CHUNK", 2)
    job = Job("one_sided", "placebo", 0, 3, 1, 1, tmp_path / "whole", tmp_path / "whole.jsonl", data, small)
    assert go(job, math.inf)
    parts = replace(job, folder=tmp_path / "parts", results=tmp_path / "parts.jsonl")
    times = iter([0.0, 2.0])  # the clock passes its limit during the first step
    with monkeypatch.context() as clock:
        now = SimpleNamespace(time=lambda: next(times), perf_counter=time.perf_counter)
        clock.setattr(triage_run, "time", now)
        assert not go(parts, 1.0)
    assert not go(parts, 0.0) and len(read_metrics(parts.folder)) == 1  # too late for a step
    assert go(parts, math.inf)
    assert go(parts, math.inf)  # done: nothing is repeated

    def numbers(folder: Path) -> list[dict[str, float]]:
        return [{k: v for k, v in line.items() if k != "time/step"} for line in read_metrics(folder)]

    assert numbers(job.folder) == numbers(parts.folder) and len(numbers(job.folder)) == 3
    (lines,), (again,) = read_results(job.results).values(), read_results(parts.results).values()
    assert [line["step"] for line in lines[0]] == [2]
    mean = statistics.fmean(line["entropy/mean"] for line in numbers(job.folder)[:2])
    assert lines[0][0]["entropy/mean"] == again[0][0]["entropy/mean"] == pytest.approx(mean, rel=1e-4)
