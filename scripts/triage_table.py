"""From the results of scripts/triage_evidence.py to numbers: means, paired differences, steps to collapse, curves.

    python scripts/triage_table.py DIR [--steps N]

DIR/results.jsonl may still be growing. --steps N: compare the first N steps of every run that has them, whatever was
asked for. Runs that are shorter are named and left out.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from triage_cases import ARMS, CONTROL, PRECISIONS, RESULTS, TAIL
from triage_stats import interval, words

LOST = 0.7  # a run has collapsed where the mean reward of a line is below this part of its best line before
LAST = 0.1  # the part of a run that its final values are means of
POINTS = 4  # of the curves in the second table

Key = tuple[str, str]  # precision, arm
Line = Mapping[str, float]  # means over the steps since the line before
Final = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="DIR")
    parser.add_argument("--steps", type=int, help="compare after this many steps (default: those asked for)")
    args = parser.parse_args()
    print(report(args.out / RESULTS, args.steps))


def report(path: Path, steps: int | None = None) -> str:
    """Both tables, what the controls say, and the runs that are too short, from a file of results."""
    runs = read_results(path)
    if not runs:
        return f"{path}: no results yet"
    steps = steps or int(max(lines[-1]["steps"] for seeds in runs.values() for lines in seeds.values()))
    whole: dict[Key, dict[int, list[Line]]] = defaultdict(dict)
    short = []
    for key, seeds in runs.items():
        for seed, lines in sorted(seeds.items()):
            if lines[-1]["step"] < steps:
                short.append(f"{'/'.join(key)}/seed{seed} ({lines[-1]['step']})")
            else:
                whole[key][seed] = [line for line in lines if line["step"] <= steps]
    finals = {key: {seed: summary(lines) for seed, lines in seeds.items()} for key, seeds in whole.items()}
    text = "\n\n".join([f"{steps} steps", table(finals), curves(whole), "\n".join(verdicts(finals))])
    return text + (f"\n\nshorter than {steps} steps: {', '.join(short)}" if short else "")


def read_results(path: Path) -> dict[Key, dict[int, list[Line]]]:
    """Lines by run, in the order of ARMS and of the steps. A run that went on from a checkpoint replaces its lines."""
    found: dict[Key, dict[int, dict[int, Line]]] = defaultdict(lambda: defaultdict(dict))
    whole = path.read_text().split("\n")[:-1] if path.exists() else []  # a killed process may leave a torn last line
    for text in whole:
        line = json.loads(text)
        found[line["precision"], line["correction"]][line["seed"]][line["step"]] = line
    order = [(precision, arm) for precision in PRECISIONS for arm in ARMS]
    return {
        key: {seed: [by_step[step] for step in sorted(by_step)] for seed, by_step in found[key].items()}
        for key in order
        if key in found
    }


def collapse_step(lines: Sequence[Line]) -> float:
    """The step by which the mean reward of a line lies below LOST of the best one before. 0 = it held."""
    best = 0.0
    for line in lines:
        if line["reward/mean"] < LOST * best:
            return line["step"]
        best = max(best, line["reward/mean"])
    return 0.0


def summary(lines: Sequence[Line]) -> Final:
    """Numbers of one run: means over its end, the best reward, and when it collapsed."""
    part = max(int(LAST * len(lines)), 1)
    keys = ("reward/mean", "entropy/mean", "gap/abs_mean", "gap/p0.1", "ratio/ess", TAIL)
    final = {key: _mean(lines[-part:], key) for key in keys}
    final["start gap/abs_mean"] = _mean(lines[:part], "gap/abs_mean")
    final["mean reward"] = _mean(lines, "reward/mean")
    final["best reward"] = max(line["reward/mean"] for line in lines)
    final["collapsed at"] = collapse_step(lines)
    return final


def _mean(lines: Sequence[Line], key: str) -> float:
    return statistics.fmean([line[key] for line in lines if line.get(key) is not None] or [math.nan])


def table(finals: Mapping[Key, Mapping[int, Final]]) -> str:
    lines = [
        "| precision | correction | seeds | collapsed (median step) | final reward | minus none, paired | mean reward "
        "| minus none, paired | best reward | entropy | mean abs gap, start -> end | gap p0.1 | negative tail |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
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
        cells += [f"{mean['best reward']:.3f}", f"{mean['entropy/mean']:.3f}"]
        cells += [f"{mean['start gap/abs_mean']:.3f} -> {mean['gap/abs_mean']:.3f}"]
        cells += [f"{mean['gap/p0.1']:.2f}", f"{mean[TAIL]:.2%}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def curves(whole: Mapping[Key, Mapping[int, Sequence[Line]]]) -> str:
    """Means over the seeds in each part of the run."""
    keys = {"reward": "reward/mean", "entropy": "entropy/mean", "abs gap": "gap/abs_mean", "gap p0.1": "gap/p0.1",
            "negative tail": TAIL, "gradient norm": "learner/grad_norm"}  # fmt: skip
    parts = [f"{i + 1}/{POINTS}" for i in range(POINTS)]
    lines = [f"| precision, correction: parts {', '.join(parts)} | " + " | ".join(keys) + " |"]
    lines.append("|---" * (len(keys) + 1) + "|")
    for (precision, arm), runs in whole.items():
        cells = [f"{precision}, {arm}"]
        for key in keys.values():
            values = []
            for i in range(POINTS):
                cut = [lines_[len(lines_) * i // POINTS : len(lines_) * (i + 1) // POINTS] for lines_ in runs.values()]
                values.append(f"{_mean([line for part in cut for line in part], key):.3g}")
            cells.append(", ".join(values))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def difference(runs: Mapping[int, Final], base: Mapping[int, Final], key: str) -> tuple[float, float] | None:
    """Of two arms over the seeds that both have."""
    shared = sorted(runs.keys() & base.keys())
    return interval([runs[seed][key] - base[seed][key] for seed in shared]) if shared else None


def verdicts(finals: Mapping[Key, Mapping[int, Final]]) -> list[str]:
    """Does the mismatch itself do harm, does it matter where the weights lie, and which part of the rule does what?"""
    said = []
    for precision, control in CONTROL.items():
        for other in (control, "bf16"):
            harm = difference(finals.get((precision, "none"), {}), finals.get((other, "none"), {}), "reward/mean")
            text = f"{precision}, none, minus {other}, none (what the mismatch costs): {words(harm, sign='+')}"
            if harm is not None and text not in said:
                said.append(text)
        for arm in ARMS:
            gain = difference(finals.get((precision, "triage"), {}), finals.get((precision, arm), {}), "reward/mean")
            if gain is not None and arm != "triage":
                said.append(f"{precision}: triage minus {arm}, final reward: {words(gain, sign='+')}")
    return said


if __name__ == "__main__":
    main()
