"""All that one `minite gap` found, as text and as JSON."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from minite.diagnostics.breakdown import Breakdown
from minite.diagnostics.causes import Cause, causes_table
from minite.diagnostics.gap_text import gap_table
from minite.diagnostics.layerwise import LayerReport, layer_table


@dataclass(frozen=True)
class Findings:
    """The gap, and what was asked for beside it."""

    name: str  # of the recipe
    plan_digest: str
    alignment: str
    gap: Breakdown
    layers: LayerReport | None = None
    causes: tuple[Cause, ...] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def text(self) -> str:
        """For a terminal."""
        parts = [f"{self.name}, plan {self.plan_digest[:12]}, alignment {self.alignment}; learner - sampler [nats]"]
        parts.append(gap_table(self.gap))
        if self.layers is not None:
            parts.append(layer_table(self.layers))
        if self.causes is not None:
            parts.append(causes_table(self.causes))
        return "\n\n".join(parts)
