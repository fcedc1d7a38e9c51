"""What a reward process serves for the tasks of reasoning_gym. The package is imported with this file, while the
process starts, and not within the time of the first answer.
"""

from __future__ import annotations

import reasoning_gym  # noqa: F401

from minite.driver import reasoning


def score(response: str, entry: str) -> float:
    """``entry``: as `reasoning.packed` writes it."""
    return reasoning.score(reasoning.unpacked(entry), response)
