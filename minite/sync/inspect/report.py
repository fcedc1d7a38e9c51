"""An inspection as text and as JSON. Modules that differ only in numbers share a line; findings say how to mend."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from minite.config.plan_table import ranges
from minite.config.rules import numberless
from minite.sync.inspect.findings import Collapsed, Finding, collapse
from minite.sync.inspect.modules import Module
from minite.sync.inspect.scales import ScaleStats

_HEAD = ("module", "count", "shape", "format", "MB", "saturated", "underflow", "zero blocks", "outer scale")


@dataclasses.dataclass(frozen=True)
class Inspection:
    """What was found in a directory."""

    directory: str
    modules: Mapping[str, Module]
    stats: Mapping[str, ScaleStats]  # of quantized modules that could be read
    findings: list[Finding]
    verified: str | None = None  # digest that all tensors were found to have

    @property
    def broken(self) -> bool:
        """Whether some reader gets wrong numbers or none."""
        return any(finding.severity == "error" for finding in self.findings)

    def text(self) -> str:
        """Table, totals, findings."""
        rows = [_HEAD, *(self._row(names) for names in self._kinds())]
        widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
        table = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
        found = [_line(group) for group in collapse(self.findings)] or ["no broken rule"]
        proof = [f"verified: every tensor is as it was written (digest {self.verified})"] if self.verified else []
        return "\n".join(_printable(line) for line in [*table, "", self._totals(), *proof, "", *found])

    def json(self) -> dict[str, Any]:
        """Everything, module by module."""
        return {
            "directory": self.directory,
            "broken": self.broken,
            "verified": self.verified,
            "modules": {
                name: {
                    "format": module.format,
                    "shape": list(module.shape),
                    "bytes": module.nbytes,
                    **({"scales": dataclasses.asdict(self.stats[name])} if name in self.stats else {}),
                }
                for name, module in self.modules.items()
            },
            "findings": [dataclasses.asdict(finding) for finding in self.findings],
        }

    def _kinds(self) -> Iterable[list[str]]:
        kinds: dict[tuple[object, ...], list[str]] = {}
        for name, module in self.modules.items():
            kinds.setdefault((numberless(name), module.shape, module.format), []).append(name)
        return kinds.values()

    def _row(self, names: list[str]) -> tuple[str, ...]:
        module = self.modules[names[0]]
        numbers = [tuple(int(s) for s in name.split(".") if s.isdigit()) for name in names]
        megabytes = sum(self.modules[name].nbytes for name in names) / 1e6
        stats = [self.stats[name] for name in names if name in self.stats]
        head = (ranges(names[0], numbers), str(len(names)), str(list(module.shape)), module.format, f"{megabytes:.1f}")
        return (*head, *_scale_cells(stats))

    def _totals(self) -> str:
        sizes: dict[str, int] = {}
        for module in self.modules.values():
            sizes[module.format] = sizes.get(module.format, 0) + module.nbytes
        kinds = ", ".join(f"{size / 1e6:,.1f} MB {name}" for name, size in sizes.items())
        return f"{self.directory}: {len(self.modules)} modules, {sum(sizes.values()) / 1e6:,.1f} MB ({kinds})"


def _scale_cells(stats: list[ScaleStats]) -> tuple[str, str, str, str]:
    blocks = sum(s.blocks for s in stats)
    if not blocks:
        return "", "", "", ""
    shares = (sum(getattr(s, key) for s in stats) for key in ("saturated", "underflowed", "zero"))
    outer = [value for s in stats for value in s.outer]
    span = f"{min(outer):.2e} .. {max(outer):.2e}" if outer else ""
    a, b, c = (f"{share / blocks:.3%}" if share else "0" for share in shares)
    return a, b, c, span


def _printable(text: str) -> str:
    """Names and configs may hold anything: no control character reaches the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _line(group: Collapsed) -> str:
    first, count = group.first, len(group.places)
    more = f" ({count} modules, the first: {first.where})" if count > 1 else ""
    return f"{first.severity}: {first.rule}: {group.where}{more}: {first.what}; {first.mend}"
