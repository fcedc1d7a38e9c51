"""The scripts of the TRIAGE evidence: placebo, statistics, collapse, the toy's controls, and a run that is resumed."""

from __future__ import annotations

import json
import math
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

SCRIPTS = Path(__file__).parents[2] / "scripts"


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
    from triage_table import LOST, SMOOTH, collapse_step, running_mean

    assert running_mean([1.0, 2.0, 3.0, 4.0], 2) == [1.5, 2.5, 3.5]
    assert collapse_step([0.1] * 30 + [0.9] * 100) is None
    fallen = collapse_step([0.8] * 100 + [0.0] * 100)
    assert fallen == 100 + math.floor(SMOOTH * (1 - LOST)) + 1
    assert collapse_step([0.8] * 100 + [0.7] * 100) is None


def test_the_table_pairs_seeds_and_names_the_cost_of_the_mismatch(tmp_path: Path) -> None:
    from triage_table import TAIL, write_results

    reward = {("unaligned", "none"): 0.5, ("unaligned", "triage"): 0.7, ("aligned", "none"): 0.9}
    jobs = []
    for (precision, arm), value in reward.items():
        for seed in range(2):
            folder = tmp_path / precision / arm / str(seed)
            folder.mkdir(parents=True)
            keys = ("entropy/mean", "gap/abs_mean", "gap/p0.1", "gap/p1", "ratio/ess", "correction/dropped_frac", TAIL)
            lines = [{"step": i, "reward/mean": value + 0.01 * seed, **dict.fromkeys(keys, 0.0)} for i in range(60)]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
            jobs.append(SimpleNamespace(precision=precision, arm=arm, seed=seed, steps=60, folder=folder))
    jobs.append(SimpleNamespace(precision="bf16", arm="none", seed=0, steps=60, folder=tmp_path / "nothing"))
    text = write_results(tmp_path, jobs)
    assert "| unaligned | triage | 2 | 0 | 0.705 +- 0.064 | +0.200 +- 0.000 |" in text
    assert "unaligned, none, minus aligned, none (what the mismatch costs): -0.400 +- 0.000" in text
    assert "1 of 7 runs are not done" in text
    assert len(json.loads((tmp_path / "results.json").read_text())) == 3


def test_the_toy_has_no_gap_without_a_mismatch_and_triage_keeps_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    import triage_toy

    short = replace(triage_toy.POLICIES["table"], steps=40)
    curves = {name: triage_toy.train(short, name, 2, 20) for name in ("no mismatch", "none", "triage")}
    assert max(abs(x) for point in curves["no mismatch"] for x in point["gap p0.1"]) == 0.0
    tail = {name: sum(curve[-1]["gap p0.1"]) / 2 for name, curve in curves.items()}
    assert tail["none"] < 2 * tail["triage"] < -0.5  # -4 against -0.6; without TRIAGE it goes on growing
    assert triage_toy.row("none", curves["none"], None).startswith("| none | ")


@pytest.mark.slow
def test_a_run_that_stopped_goes_on_as_if_it_had_not(tmp_path: Path) -> None:
    from triage_cases import write_questions
    from triage_run import Job, go, read_metrics

    data = tmp_path / "questions.jsonl"
    write_questions(data, count=200)
    small = ("warm_start.steps=2", "warm_start.batch_size=8", "algo.prompts_per_step=4", "learner.device=cpu",
             "sampler.device=cpu", "learner.warmup_steps=0")  # fmt: skip
    job = Job("one_sided", "placebo", 0, 3, 1, 1, tmp_path / "whole", data, small)
    assert go(job, math.inf)
    parts = replace(job, folder=tmp_path / "parts")
    assert not go(parts, 0.0) and go(parts, time.time() + 1e6)
    assert go(parts, math.inf)  # done: nothing is repeated

    def numbers(folder: Path) -> list[dict[str, float]]:
        return [{k: v for k, v in line.items() if k != "time/step"} for line in read_metrics(folder)]

    assert numbers(job.folder) == numbers(parts.folder) and len(numbers(job.folder)) == 3
