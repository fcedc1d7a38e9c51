"""sampler.make_engine, and the benchmark that starts from a recipe."""

import pytest
import torch
from tiny_engine import MOE, config

from minite.backends.reference import ReferenceBackend
from minite.config import resolve_plan
from minite.errors import UserError
from minite.sampler import make_engine
from minite.sampler.embedded import EmbeddedEngine


def test_the_built_in_engine_on_the_device_asked_for():
    cfg = config(MOE, sampler={"device": "cpu"})
    engine = make_engine(cfg, resolve_plan(cfg))
    assert isinstance(engine, EmbeddedEngine) and engine.device == torch.device("cpu")
    auto = config(MOE, sampler={"device": "auto"})
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert make_engine(auto, resolve_plan(auto)).device.type == expected


@pytest.mark.parametrize(
    ("version", "message"),
    [(None, "sglang is not installed: docs/sglang.md"), ("0.5.14", "sglang 0.5.14 is too old: expected 0.5.15")],
)
def test_sglang_missing_or_too_old_is_a_plain_error(monkeypatch, version, message):
    monkeypatch.setattr("minite.sampler.sglang.compat.installed", lambda: version)
    cfg = config(MOE, sampler={"kind": "sglang"})
    with pytest.raises(UserError, match=message):
        make_engine(cfg, resolve_plan(cfg))


@pytest.mark.parametrize(
    ("op", "module"), [("gemm", "layers.0.self_attn.q"), ("grouped_gemm", "layers.0.mlp.experts.0.gate")]
)
def test_operands_that_the_backend_lacks_are_refused_before_any_weights(monkeypatch, op, module):
    reasons = lambda self, asked, weight, input: f"no {asked} here" if asked == op else None  # noqa: E731
    monkeypatch.setattr(ReferenceBackend, "unsupported_reason", reasons)
    cfg = config(MOE, "w4a4", sampler={"device": "cpu"})
    with pytest.raises(UserError, match=rf"model\.{module}_proj: .* of weight nvfp4_1d with input .*: no {op} here"):
        make_engine(cfg, resolve_plan(cfg))
