"""The documented metric keys, for any test that sees a run's metrics."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

TABLE = Path(__file__).parents[2] / "docs" / "metrics.md"


def undocumented(keys: Iterable[str]) -> list[str]:
    """Keys that the table of docs/metrics.md does not name."""
    first_cells = [row.split("|")[1] for row in TABLE.read_text().splitlines() if row.startswith("|")]
    documented = re.findall(r"`([a-z_]+/[^`]+)`", "\n".join(first_cells))
    patterns = [re.sub(r"<[a-z]+>", "[a-z0-9_]+", re.sub(r"\.", r"\\.", key)) for key in documented]
    return [key for key in keys if not any(re.fullmatch(pattern, key) for pattern in patterns)]
