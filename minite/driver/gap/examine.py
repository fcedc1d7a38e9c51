"""One `minite gap`: the measurement and what was asked for beside it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from minite.diagnostics.gap_findings import Findings
from minite.driver.gap.causes import attribute
from minite.driver.gap.layers import examine_layers
from minite.driver.gap.measure import measure
from minite.driver.gap.subject import Note, open_subject


def examine(
    path: Path, overrides: Sequence[str], prompts: Path | None, *, layers: bool, causes: bool, note: Note
) -> Findings:
    """The gap of a recipe or a run directory. Raises UserError for what the run itself would refuse.

    prompts: a file of prompts instead of the recipe's. layers: also compare operation by operation. causes: also
    measure with one factor changed at a time. note: takes lines of progress.
    """
    subject = open_subject(path, overrides, prompts, note)
    gap = measure(subject, note)
    return Findings(
        subject.config.name,
        subject.plan.digest,
        subject.plan.alignment,
        gap,
        examine_layers(subject, note) if layers else None,
        attribute(subject, gap.summary, note) if causes else None,
    )
