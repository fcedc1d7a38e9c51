"""Rewards for slime's --custom-rm-path."""

from __future__ import annotations

from typing import Any


async def math_verify(args: Any, sample: Any) -> float:
    """1.0 when the last \\boxed answer of the response equals the label as mathematics, else 0.0.

    The package math-verify parses both, and looks for an answer elsewhere where nothing is boxed; one that it cannot
    find is wrong.
    """
    from math_verify import parse, verify

    # Its timeouts use signals, which only a main thread may set; slime calls from others.
    gold = parse(f"\\boxed{{{sample.label}}}", parsing_timeout=None)
    last = max(sample.response.rfind("\\boxed"), 0)  # it would take several boxes for one set of answers
    answer = parse(sample.response[last:], parsing_timeout=None)
    return float(verify(gold, answer, timeout_seconds=None))
