"""Real SGLang on its CPU engine, for the tests that need it."""

from __future__ import annotations

import pytest
from tiny_engine import config

from minite.config import RunConfig, resolve_plan
from minite.learner import cpu_compat
from minite.sampler import make_engine
from minite.sampler.sglang.compat import installed
from minite.sampler.sglang.engine import SglangEngine

NEEDS_SGLANG = [
    pytest.mark.skipif(installed() is None, reason="needs SGLang: run scripts/test_sglang"),
    pytest.mark.slow,
    pytest.mark.timeout(1800),  # three interpreters import SGLang first, and the machine may be busy
]


def sglang_engine(model: dict, fmt: str, *, server: bool = False, **changes: object) -> tuple[RunConfig, SglangEngine]:
    """A recipe of tiny_engine and SGLang started for it, without weights. To be closed."""
    cpu_compat.install("cpu")  # SGLang may import megatron, which a learner of this process needs prepared
    sampler = {"kind": "sglang", "device": "cpu", "max_batch": 64, "server": server}
    cfg = config(model, fmt, sampler=sampler, **changes)
    made = make_engine(cfg, resolve_plan(cfg))
    assert isinstance(made, SglangEngine)
    return cfg, made
