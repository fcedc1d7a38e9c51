"""What is wrong with a checkpoint: one finding for each rule and kind of module, however many of them break it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from minite.config.plan_table import ranges
from minite.config.rules import numberless

ERROR, WARNING, NOTE = "error", "warning", "note"  # wrong numbers or unreadable | some reader may fail | worth knowing
_ORDER = {ERROR: 0, WARNING: 1, NOTE: 2}


@dataclass(frozen=True)
class Finding:
    """One broken rule at one place."""

    severity: str
    rule: str  # a short name, for people and programs
    where: str  # module, tensor or file
    what: str
    mend: str


@dataclass
class Collapsed:
    """Findings that differ only in layer and expert number."""

    first: Finding
    places: list[str] = field(default_factory=list)

    @property
    def where(self) -> str:
        numbers = [tuple(int(s) for s in place.split(".") if s.isdigit()) for place in self.places]
        return ranges(self.first.where, numbers)


def collapse(findings: Iterable[Finding]) -> list[Collapsed]:
    """Errors first; within a severity in the order found."""
    groups: dict[tuple[str, str, str], Collapsed] = {}
    for f in findings:
        groups.setdefault((f.severity, f.rule, numberless(f.where)), Collapsed(f)).places.append(f.where)
    return sorted(groups.values(), key=lambda group: _ORDER[group.first.severity])
