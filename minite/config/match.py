"""Patterns over module paths, whole segments only, so that ``mlp.gate`` never means ``mlp.gate_proj``.

``*`` stands for exactly one segment, ``**`` for any number of them, zero included. A star inside a segment is an error.
"""

from __future__ import annotations

import re
from functools import lru_cache


@lru_cache(maxsize=1024)
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression over ``name + "."``. Raises ValueError for an empty or partial segment."""
    parts = []
    for segment in pattern.split("."):
        if segment == "**":
            parts.append(r"(?:[^.]+\.)*")
        elif segment == "*":
            parts.append(r"[^.]+\.")
        elif not segment or "*" in segment:
            raise ValueError(f"segment '{segment}' of pattern '{pattern}'")
        else:
            parts.append(re.escape(segment) + r"\.")
    return re.compile("".join(parts))


def matches(pattern: str, name: str) -> bool:
    """Whether the dotted ``name`` as a whole fits the pattern."""
    return compile_pattern(pattern).fullmatch(name + ".") is not None
