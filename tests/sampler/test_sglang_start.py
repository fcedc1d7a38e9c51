"""An engine that cannot prove itself at the start is ended again. A stand-in takes SGLang's place."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from tiny_engine import DENSE, config

from minite.config import resolve_plan
from minite.sampler.sglang import engine
from minite.sync.errors import SyncError


def test_what_was_started_is_ended_when_the_plugin_is_missing(monkeypatch):
    ended = []
    stand_in = SimpleNamespace(get_server_info=lambda: {"internal_states": [{}]}, shutdown=lambda: ended.append(True))
    monkeypatch.setattr(engine, "make_engine", lambda arguments: stand_in)
    monkeypatch.setattr(engine, "compat", lambda: None)
    monkeypatch.setattr(engine.env, "apply_sglang_env", lambda device, ranks: None)
    cfg = config(DENSE, sampler={"kind": "sglang", "device": "cpu"})
    with pytest.raises(SyncError, match="plugin is not active"):
        engine.SglangEngine(cfg, resolve_plan(cfg), "cpu")
    assert ended == [True]
