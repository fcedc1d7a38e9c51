"""The record of a run: metrics.jsonl, one line a step, and the same numbers to exporters and on the screen.

The keys and their units are in docs/metrics.md.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from minite.errors import DiskError, UserError

if TYPE_CHECKING:
    from minite.driver.exporters import Exporter
    from minite.driver.progress import ProgressView

METRICS_FILE = "metrics.jsonl"
REPAIRS = "recovery/"  # begins the keys of driver/recovery.py


class Recorder(Protocol):
    """Where a run puts the numbers of a step."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...


class MetricsWriter:
    """Appends one line a step, on the disk when `write` returns. A context manager.

    after_step: None for a new run; for a resumed one the step of its checkpoint: later lines are taken out first, so
    that no step stands twice. ``repairs`` is what they had counted. Write a step's line before its checkpoint, or a
    kill between the two loses the line.
    """

    def __init__(
        self,
        run_dir: Path,
        view: ProgressView | None,
        exporters: Sequence[Exporter] = (),
        *,
        after_step: int | None = None,
    ) -> None:
        path = run_dir / METRICS_FILE
        self.repairs = {} if after_step is None else truncate_after(path, after_step)
        self._file = path.open("a", encoding="utf-8")
        self._view, self._exporters = view, exporters  # whoever opened them closes them

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step. A value that is not finite is null in the file, as JSON has no word for it."""
        record = {"step": step, **{key: _json_number(value) for key, value in sorted(metrics.items())}}
        try:
            self._file.write(json.dumps(record, allow_nan=False) + "\n")
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise DiskError(
                f"{self._file.name}: {error}; make room or rights there, then go on with minite resume"
            ) from None
        for exporter in self._exporters:
            exporter.write(step, metrics)
        if self._view is not None:
            self._view.update(step, metrics)

    def close(self) -> None:
        with suppress(OSError):  # write has told of it
            self._file.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def truncate_after(path: Path, last_step: int) -> dict[str, float]:
    """Keep the lines of steps up to ``last_step``, in one atomic replacement. Returns the sums of what the others say
    of repairs: their steps are done again, but what was repaired in them happened.

    A torn last line, left by a killed process, goes too. Raises UserError for any other line that is no record.
    """
    repairs: dict[str, float] = {}
    if not path.exists():
        return repairs
    lines = path.read_bytes().split(b"\n")
    kept = []
    for number, line in enumerate(lines[:-1], 1):  # what follows the last newline is empty or torn
        try:
            record = json.loads(line)
            later = record["step"] > last_step
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"{path}:{number}: {line[:40].decode(errors='replace')!r} is not the record of a step; "
                "repair or remove the line, then resume"
            ) from None
        if not later:
            kept.append(line + b"\n")
            continue
        for key in (key for key in record if key.startswith(REPAIRS)):
            repairs[key] = repairs.get(key, 0.0) + record[key]
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        file.writelines(kept)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)
    return repairs


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
