"""The reward function of scripts/fault_campaign.py: exact match, until a file in its directory orders a fault."""

from __future__ import annotations

import time
from pathlib import Path

ORDER = Path("bad_reward")  # holds raise, hang or nan; done once


def score(response: str, answer: str) -> float:
    """1 for the right answer, 0 for another."""
    try:
        order = ORDER.read_text()
        ORDER.unlink()
    except FileNotFoundError:
        order = ""
    if order == "raise":
        raise ZeroDivisionError("ordered")
    if order == "hang":
        time.sleep(3600)
    return float("nan") if order == "nan" else float(response.strip() == answer.strip())
