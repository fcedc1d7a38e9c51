"""Every task on every recipe, and the tables of it. The first recipe is what the others are compared with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minite.config import RunConfig
from minite.evaluation.compare import interval, paired_difference
from minite.evaluation.outcome import Outcome, Tell
from minite.evaluation.subject import load
from minite.evaluation.tasks import Task, find


@dataclass(frozen=True)
class Result:
    """One task on one recipe, beside the same task on the first recipe."""

    task: str
    recipe: str
    digest: str  # of the precision plan
    outcome: Outcome
    base: Outcome | None  # None for the first recipe itself

    def figures(self) -> dict[str, Any]:
        """Mean, perplexity where it has one, and the difference from the first recipe, each with its 95 % interval."""
        figures: dict[str, Any] = {"mean": self.outcome.mean, "interval": interval(self.outcome.value_N)}
        if self.outcome.metric == "nats/token":
            figures["perplexity"] = math.exp(self.outcome.mean)
        if self.base is not None:
            difference, bounds = paired_difference(self.outcome.value_N, self.base.value_N)
            figures |= {"difference": difference, "difference_interval": bounds}
        return figures


def evaluate(
    checkpoint: Path, configs: Sequence[RunConfig], names: Sequence[str], tell: Tell, limit: int | None = None
) -> list[Result]:
    """Results by recipe, then by task; ``limit`` bounds the items of lm-eval's. One model is in memory at a time."""
    tasks = find(names, limit)
    results: list[Result] = []
    base: dict[str, Outcome] = {}
    for i, config in enumerate(configs, 1):
        tell(f"{config.name} ({i} of {len(configs)}): loading {checkpoint}")
        results += _on_one(checkpoint, config, tasks, base, tell)
        base = base or {result.task: result.outcome for result in results}
    return results


def _on_one(
    checkpoint: Path, config: RunConfig, tasks: Mapping[str, Task], base: Mapping[str, Outcome], tell: Tell
) -> list[Result]:
    """Of one recipe, whose model is gone from memory on return."""
    subject = load(checkpoint, config)
    digest = subject.engine.plan.digest
    return [Result(name, config.name, digest, task(subject, tell), base.get(name)) for name, task in tasks.items()]


def table(results: Sequence[Result]) -> str:
    """A Markdown table for each task, and below it what is to be read."""
    parts = []
    for task in dict.fromkeys(result.task for result in results):
        rows = [result for result in results if result.task == task]
        first = rows[0]
        parts.append(f"{task}: {first.outcome.about}\n")
        perplexity = " perplexity |" if "perplexity" in first.figures() else ""
        head = f"| recipe | {first.outcome.metric} [95 %] |{perplexity} minus {first.recipe} [95 %] |"
        parts += [head, "|---" * (head.count("|") - 1) + "|", *(_row(row) for row in rows), ""]
        for row in rows:
            for prompt, answer in row.outcome.samples:
                parts.append(f"{row.recipe}: {prompt}\n    " + answer.replace("\n", "\n    "))
    return "\n".join(parts)


def _row(result: Result) -> str:
    f = result.figures()
    cells = [result.recipe, f"{f['mean']:.4f} [{f['interval'][0]:.4f}, {f['interval'][1]:.4f}]"]
    if "perplexity" in f:
        cells.append(f"{f['perplexity']:.3f}")
    low, high = f.get("difference_interval", (0.0, 0.0))
    cells.append(f"{f['difference']:+.4f} [{low:+.4f}, {high:+.4f}]" if "difference" in f else "")
    return "| " + " | ".join(cells) + " |"


def to_json(results: Sequence[Result]) -> list[dict[str, Any]]:
    """The same with the value of every item, for other programs."""
    return [
        {
            "task": result.task,
            "recipe": result.recipe,
            "plan_digest": result.digest,
            "metric": result.outcome.metric,
            "about": result.outcome.about,
            **result.figures(),
            "values": result.outcome.value_N,
            "samples": result.outcome.samples,
        }
        for result in results
    ]
