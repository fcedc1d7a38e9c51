"""From the runs of scripts/triage_evidence.py to numbers: means, paired differences, steps to collapse, curves."""

from __future__ import annotations

import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from triage_cases import CONTROL
from triage_run import TAIL, Job, read_metrics
from triage_stats import interval, words

SMOOTH = 25  # steps of the running mean in which a collapse is looked for
LOST = 0.7  # a run has collapsed where its running mean reward is below this part of its best
LAST = 0.1  # the part of a run that its final values are means of
POINTS = 40  # of a curve

Key = tuple[str, str]  # precision, arm
Final = dict[str, float]


def running_mean(values: Sequence[float], width: int) -> list[float]:
    """Of every ``width`` values in a row."""
    total, means = sum(values[:width]), []
    for i in range(width, len(values) + 1):
        means.append(total / width)
        total += values[i] - values[i - width] if i < len(values) else 0.0
    return means


def collapse_step(rewards: Sequence[float]) -> int | None:
    """The first step at which the running mean reward lies below LOST of the best one before. None = it held."""
    best = 0.0
    for i, mean in enumerate(running_mean(rewards, min(SMOOTH, len(rewards)))):
        if mean < LOST * best:
            return i + SMOOTH
        best = max(best, mean)
    return None


def summary(lines: list[dict[str, float]]) -> Final:
    """Numbers of one run: means over its end, the best reward, and when it collapsed (0 = never)."""
    end = lines[-max(int(LAST * len(lines)), 1) :]
    final = {key: statistics.fmean([line[key] for line in end if line.get(key) is not None] or [math.nan])
             for key in ("reward/mean", "entropy/mean", "gap/abs_mean", "gap/p0.1", "ratio/ess", TAIL)}  # fmt: skip
    rewards = [line["reward/mean"] for line in lines]
    start = lines[: max(int(LAST * len(lines)), 1)]
    final["start gap/abs_mean"] = statistics.fmean(line["gap/abs_mean"] for line in start)
    final["mean reward"] = statistics.fmean(rewards)
    final["best reward"] = max(running_mean(rewards, min(SMOOTH, len(rewards))))
    final["collapsed at"] = float(collapse_step(rewards) or 0)
    final["steps"] = float(len(lines))
    return final


def curves(runs: Sequence[list[dict[str, float]]]) -> dict[str, list[float]]:
    """Means over seeds at POINTS parts of the run."""
    length = min(len(lines) for lines in runs)
    edges = [round(i * length / POINTS) for i in range(POINTS + 1)]
    found: dict[str, list[float]] = {"step": [float(b) for b in edges[1:]]}
    for key in ("reward/mean", "entropy/mean", "gap/abs_mean", "gap/p0.1", "gap/p1", "correction/dropped_frac", TAIL):
        found[key] = [
            statistics.fmean([line[key] for lines in runs for line in lines[a:b] if line.get(key) is not None] or [0.0])
            for a, b in zip(edges, edges[1:], strict=False)
        ]
    return found


def write_results(out: Path, jobs: Sequence[Job]) -> str:
    """Write results.json; the table, over the seeds of which a run is whole."""
    whole: dict[Key, dict[int, list[dict[str, float]]]] = defaultdict(dict)
    for job in jobs:
        lines = read_metrics(job.folder)
        if len(lines) >= job.steps:
            whole[job.precision, job.arm][job.seed] = lines[: job.steps]
    finals = {key: {seed: summary(lines) for seed, lines in runs.items()} for key, runs in whole.items()}
    content = [
        {"precision": key[0], "correction": key[1], "seeds": finals[key], "curves": curves(list(runs.values()))}
        for key, runs in whole.items()
    ]
    (out / "results.json").write_text(json.dumps(content))
    missing = sum(1 for job in jobs if job.seed not in whole.get((job.precision, job.arm), {}))
    text = table(finals) + "\n\n" + "\n".join(verdicts(finals))
    return text + (f"\n{missing} of {len(jobs)} runs are not done: the same command goes on" if missing else "")


def table(finals: Mapping[Key, Mapping[int, Final]]) -> str:
    lines = [
        "| precision | correction | seeds | collapsed (median step) | final reward | minus none, paired | mean reward "
        "| minus none, paired | entropy | mean abs gap, start -> end | gap p0.1 | negative tail |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (precision, arm), runs in finals.items():
        base = finals.get((precision, "none"), {})
        mean = {key: statistics.fmean(run[key] for run in runs.values()) for key in next(iter(runs.values()))}
        lost = sorted(run["collapsed at"] for run in runs.values() if run["collapsed at"])
        when = f"{len(lost)} ({statistics.median(lost):.0f})" if lost else "0"
        cells = [precision, arm, str(len(runs)), when]
        for key in ("reward/mean", "mean reward"):
            cells.append(words(interval([run[key] for run in runs.values()])))
            cells.append(words(difference(runs, base, key), sign="+") if arm != "none" else "")
        cells += [f"{mean['entropy/mean']:.3f}", f"{mean['start gap/abs_mean']:.3f} -> {mean['gap/abs_mean']:.3f}"]
        cells += [f"{mean['gap/p0.1']:.2f}", f"{mean[TAIL]:.2%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference(runs: Mapping[int, Final], base: Mapping[int, Final], key: str) -> tuple[float, float] | None:
    """Of two arms over the seeds that both have."""
    shared = sorted(runs.keys() & base.keys())
    return interval([runs[seed][key] - base[seed][key] for seed in shared]) if shared else None


def verdicts(finals: Mapping[Key, Mapping[int, Final]]) -> list[str]:
    """What the two controls say: does the mismatch itself do harm, and does it matter where the weights lie?"""
    said = []
    for precision, control in CONTROL.items():
        harm = difference(finals.get((precision, "none"), {}), finals.get((control, "none"), {}), "reward/mean")
        if harm is not None:
            said.append(f"{precision}, none, minus {control}, none (what the mismatch costs): {words(harm, sign='+')}")
        for other in ("placebo", "tis", "icepop"):
            gain = difference(finals.get((precision, "triage"), {}), finals.get((precision, other), {}), "reward/mean")
            if gain is not None:
                said.append(f"{precision}: triage minus {other}: {words(gain, sign='+')}")
    return said
