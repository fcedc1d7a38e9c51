"""Where the time of a weight sync goes, phase by phase."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


class Clock:
    """Seconds by phase. A phase within another counts for itself only; work on a GPU is waited for."""

    def __init__(self, device: torch.device | None = None) -> None:
        self.seconds: dict[str, float] = {}
        self._device = device if device is not None and device.type == "cuda" else None
        self._within = 0.0  # taken by phases inside of the one under way

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Counts the block."""
        outer, self._within = self._within, 0.0
        start = time.perf_counter()
        try:
            yield
        finally:
            if self._device is not None:
                torch.cuda.synchronize(self._device)
            took = time.perf_counter() - start
            self.seconds[phase] = self.seconds.get(phase, 0.0) + took - self._within
            self._within = outer + took

    def during(self, phase: str, items: Iterable[T]) -> Iterator[T]:
        """The items; counts the time it takes to make them."""
        iterator = iter(items)
        while True:
            with self.timed(phase):
                item = next(iterator, self)
            if item is self:
                return
            yield item  # type: ignore[misc]
