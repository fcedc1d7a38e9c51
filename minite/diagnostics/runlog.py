"""Reading what a run wrote: metrics.jsonl with all that can be wrong in it, config.json and plan.json."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from minite.errors import UserError


@dataclass
class RunLog:
    """A run directory in memory."""

    name: str
    steps: list[int]  # ascending, each once
    series: dict[str, dict[int, float]]  # key -> step -> value; nan where it was recorded and is no finite number
    config: dict[str, Any] | None  # None = no such file, or not readable
    plan: dict[str, Any] | None
    notes: list[str] = field(default_factory=list)  # what a reader must know about the data

    def setting(self, path: str) -> Any:
        """A value of config.json by dotted path; None where the run did not record it."""
        node: Any = self.config
        for part in path.split("."):
            node = node.get(part) if isinstance(node, dict) else None
        return node


def read_run(run_dir: Path) -> RunLog:
    """Read a run directory.

    metrics.jsonl is a line of JSON a step: "step" and numbers by key. A step that comes twice (a resumed run does its
    last steps again) counts as its later line. A last line cut off by a crash, lines that are no record and missing
    side files are told in ``notes``.

    Raises: UserError where there is no metrics.jsonl or no step in it.
    """
    path = run_dir / "metrics.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no such file; expected a run directory, as minite train --run-dir makes one")
    records, notes = _read_records(path.read_text(encoding="utf-8", errors="replace"))
    if not records:
        raise UserError(f"{path}: holds no finished step yet; a report needs at least one")
    series: dict[str, dict[int, float]] = {}
    for step in sorted(records):
        for key, value in records[step].items():
            if key != "step" and (number := _number(value)) is not None:
                series.setdefault(key, {})[step] = number
    bad = {step for values in series.values() for step, value in values.items() if math.isnan(value)}
    if bad:
        notes.append(f"values that are not finite in {len(bad)} of {len(records)} steps, first in step {min(bad)}")
    config, plan = (_read_json(run_dir / name, notes) for name in ("config.json", "plan.json"))
    name = config.get("name", run_dir.name) if config else run_dir.resolve().name
    return RunLog(str(name), sorted(records), series, config, plan, notes)


def _read_records(text: str) -> tuple[dict[int, dict[str, Any]], list[str]]:
    """Records by step, and notes on lines that are none."""
    records: dict[int, dict[str, Any]] = {}
    notes: list[str] = []
    unreadable = repeated = 0
    lines = text.splitlines()
    for number, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
            step = int(record["step"])
        except (ValueError, KeyError, TypeError, RecursionError):
            if number == len(lines) - 1 and not text.endswith("\n"):
                notes.append(
                    "the last line of metrics.jsonl is cut off (the run was stopped while writing it): left out"
                )
            else:
                unreadable += 1
            continue
        repeated += step in records
        records[step] = record
    if unreadable:
        notes.append(f"lines of metrics.jsonl that are no record of a step: {unreadable}, left out")
    if repeated:
        notes.append(f"steps done again after a resume: {repeated}, the later run of each counts")
    return records, notes


def _number(value: Any) -> float | None:
    """A metric as a float; nan for null and for what is not finite; None for what is no number at all."""
    if value is None:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) < math.inf else math.nan


def _read_json(path: Path, notes: list[str]) -> dict[str, Any] | None:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        notes.append(f"the run directory has no {path.name}")
        return None
    except (ValueError, RecursionError):
        notes.append(f"{path.name} is not readable JSON")
        return None
    return data if isinstance(data, dict) else None
