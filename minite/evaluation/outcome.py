"""What a task returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

Tell = Callable[[str], None]  # takes a line of progress


@dataclass(frozen=True)
class Outcome:
    """One value per item, so that two subjects can be compared item by item."""

    metric: str  # what a value is, with its unit
    value_N: tuple[float, ...]
    about: str  # what the items are: source, version, number
    samples: tuple[tuple[str, str], ...] = ()  # (prompt, answer), to be read

    @property
    def mean(self) -> float:
        return sum(self.value_N) / len(self.value_N)
