"""How far a command that moves bytes is: a bar with speed and time left on a terminal, ten plain lines elsewhere."""

from __future__ import annotations

import time
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn


class ByteProgress:
    """Context manager; call it with (bytes done, bytes in all), as often as you like. Writes to stderr.

    Bytes that were done at the first call count as an earlier run's: speed and time left are of this one.
    """

    def __init__(self, title: str, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._title = title
        self._bar: Progress | None = None
        self._started = time.monotonic()
        self._first: int | None = None
        self._tenths = 0

    def __enter__(self) -> ByteProgress:
        if self._console.is_terminal:
            columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
            self._bar = Progress(TextColumn("{task.description}"), *columns, console=self._console)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, total: int) -> None:
        if self._bar is not None:
            self._bar.update(self._task, completed=done, total=total)
            return
        if self._first is None:
            self._first = done
        tenths = done * 10 // max(total, 1)  # of nothing at all, if all tensors are empty
        if tenths > self._tenths:
            self._tenths = tenths
            self._console.print(self._line(done, total), markup=False, highlight=False, soft_wrap=True)

    def _line(self, done: int, total: int) -> str:
        seconds = max(time.monotonic() - self._started, 1e-9)
        speed = (done - (self._first or 0)) / seconds
        left = f", about {(total - done) / speed:.0f} s left" if speed and done < total else ""
        return f"{self._title}: {done / 1e6:,.0f} of {total / 1e6:,.0f} MB, {speed / 1e6:,.0f} MB/s{left}"
