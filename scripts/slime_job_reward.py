"""Reward of scripts/slime_job.py."""

from __future__ import annotations

from typing import Any


async def even(args: Any, sample: Any) -> float:
    """Share of even tokens in a response: learned in a few rollouts by any network, pretrained or not."""
    tokens = sample.tokens[-sample.response_length :] if sample.response_length else []
    return sum(token % 2 == 0 for token in tokens) / max(1, len(tokens))
