"""What a person sees while a run goes on: a live table on a terminal, one line a step anywhere else."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

# Header, key, format. A step that lacks the key shows a blank (held-out accuracy is not measured every step).
COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("reward", "reward/mean", ".3f"),
    ("held-out", "accuracy/heldout", ".3f"),
    ("|gap| mean", "gap/abs_mean", ".0e"),
    ("|gap| p99", "gap/abs_p99", ".0e"),
    ("entropy", "entropy/mean", ".3f"),
    ("dropped", "correction/dropped_frac", ".2%"),
    ("length", "response/length_mean", ".1f"),
    ("step [s]", "time/step", ".2f"),
)
ROWS = 15  # steps that the live table shows


class ProgressView:
    """``update`` after each step, ``note`` for anything worth a sentence, ``close`` at the end."""

    def __init__(self, title: str, total_steps: int, console: Console | None = None) -> None:
        self._console = console or Console()
        self._title = title
        self._total = total_steps
        self._rows: deque[list[str]] = deque(maxlen=ROWS)
        self._started = time.monotonic()
        self._first_step: int | None = None
        self._first_shown = self._started
        self._live: Live | None = None

    def update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the numbers of a step."""
        if self._first_step is None:
            self._first_step, self._first_shown = step, time.monotonic()  # start-up must not count as steps
            if not self._console.is_terminal:
                self._line("step", [header for header, _, _ in COLUMNS])
        cells = [_cell(metrics.get(key), form) for _, key, form in COLUMNS]
        if not self._console.is_terminal:
            self._line(f"{step}/{self._total}", cells)
            return
        self._rows.append([str(step), *cells])
        if self._live is None:
            self._live = Live(console=self._console, auto_refresh=False)
            self._live.start()
        self._live.update(Group(self._table(), Text(self._status(step))), refresh=True)

    def note(self, text: str) -> None:
        """A sentence above the table, or a line of its own."""
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _table(self) -> Table:
        table = Table(title=self._title, box=None, padding=(0, 1))  # without borders it fits 80 columns
        for header in ("step", *(header for header, _, _ in COLUMNS)):
            table.add_column(header, justify="right", no_wrap=True)
        for row in self._rows:
            table.add_row(*row)
        return table

    def _status(self, step: int) -> str:
        now = time.monotonic()
        elapsed, training = now - self._started, now - self._first_shown
        done = step - self._first_step if self._first_step is not None else 0
        left = f", about {_clock(training / done * (self._total - step))} left" if done else ""
        return f"step {step} of {self._total}, {_clock(elapsed)} so far{left}"

    def _line(self, first: str, cells: list[str]) -> None:
        self.note(f"{first:>9}" + "".join(f"{cell:>11}" for cell in cells))


def _cell(value: float | None, form: str) -> str:
    if value is None:
        return ""
    return format(value, form) if math.isfinite(value) else str(value)


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
