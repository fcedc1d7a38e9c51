"""The attribution table: the gap with one factor changed at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minite.diagnostics.gap_text import columns
from minite.types import GapSummary


@dataclass(frozen=True)
class Cause:
    """The gap under one change of the recipe; the first row of a table has none."""

    factor: str
    change: str
    summary: GapSummary


def causes_rows(causes: Sequence[Cause]) -> list[list[str]]:
    """Texts of the table. "of base" is the mean |gap| as a multiple of the unchanged recipe's."""
    base = causes[0].summary.abs_mean
    return [
        [
            f"{c.factor}: {c.change}" if c.change else c.factor,
            str(c.summary.tokens),
            f"{c.summary.abs_mean:.2e}",
            f"{c.summary.abs_mean / base:.3g}" if base else "",
            f"{c.summary.abs_p99:.2e}",
            f"{c.summary.p01:+.2e}",
            f"{c.summary.abs_max:.2e}",
        ]
        for c in causes
    ]


HEAD = ["one factor changed", "tokens", "mean |gap|", "of base", "p99 |gap|", "p1", "max |gap|"]


def causes_table(causes: Sequence[Cause]) -> str:
    """For a terminal. [nats]"""
    return "\n".join(columns(HEAD, causes_rows(causes)))
