"""How often a run may repair what died or hung, and what that cost."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Recovery:
    """Counts repairs. More than ``limit`` in a row, without a step further than any before between them, are too many.

    A repair that only leads to the same failure again would otherwise go on for ever.
    """

    def __init__(self, limit: int, note: Callable[[str], None]) -> None:
        self._limit, self._note = limit, note
        self._in_a_row = 0
        self._furthest = -1
        self._counts: dict[str, float] = {}

    def spend(self, error: Exception, remedy: str) -> None:
        """Say what failed and what is done about it. Raises ``error`` itself when there were too many in a row."""
        if self._in_a_row >= self._limit:
            raise error
        self._in_a_row += 1
        self._note(f"{error}; {remedy} (repair {self._in_a_row} of at most {self._limit} in a row: driver.retries)")

    def count(self, key: str, amount: float = 1.0) -> None:
        self._counts[key] = self._counts.get(key, 0.0) + amount

    def add(self, counts: Mapping[str, float]) -> None:
        """Counts that were in lines now taken out."""
        for key, amount in counts.items():
            self.count(key, amount)

    @contextmanager
    def repairing(self, key: str) -> Iterator[None]:
        """Count a repair that succeeds under ``key``, and its time in any case."""
        started = time.perf_counter()
        try:
            yield
            self.count(key)
        finally:
            self.count("recovery/seconds", time.perf_counter() - started)

    def take_metrics(self) -> dict[str, float]:
        """What was counted since the last call; empty when nothing failed."""
        counts, self._counts = self._counts, {}
        return counts

    def step_done(self, step: int) -> None:
        if step > self._furthest:
            self._furthest, self._in_a_row = step, 0
