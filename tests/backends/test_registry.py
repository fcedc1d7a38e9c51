"""Choosing a backend: what can run is chosen, what cannot is named with the reason."""

from __future__ import annotations

import pytest
import torch

from minite.backends import registry
from minite.backends.cpu.backend import CpuBackend
from minite.backends.reference import ReferenceBackend
from minite.config.checks import CHOICES
from minite.errors import UserError


class NeedsGpu:
    name, kind = "fast", "native"

    def __init__(self, *, strict):
        self.strict = strict

    @staticmethod
    def refused(device, strict):
        return None if device == "cuda" and not strict else f"cannot on {device}, strict {strict}"


@pytest.fixture
def two_backends(monkeypatch):
    monkeypatch.setattr(registry, "_HOMES", {"fast": (__name__, "NeedsGpu"), **registry._HOMES})


@pytest.mark.parametrize("strict", [False, True])
def test_auto_is_the_compiled_backend_on_a_cpu(strict):
    backend = registry.get_backend("auto", device="cpu", strict=strict)
    assert isinstance(backend, CpuBackend) and backend.strict == strict
    plain = registry.get_backend("reference", device="cpu", strict=strict)
    assert type(plain) is ReferenceBackend and plain.strict == strict


def test_auto_takes_the_best_that_is_not_refused(two_backends):
    assert registry.get_backend("auto", device=torch.device("cuda:1"), strict=False).name == "fast"
    assert registry.get_backend("auto", device="cuda", strict=True).name == "reference"
    verdicts = registry.explain(device="cpu", strict=False)
    assert [(v.name, v.kind, v.refusal) for v in verdicts] == [
        ("fast", "native", "cannot on cpu, strict False"),
        ("native", "native", "runs on CUDA devices, not on cpu"),
        ("triton", "emulated", "runs on CUDA devices, not on cpu"),
        ("cpu", "emulated", None),
        ("reference", "reference", None),
    ]


def test_a_named_backend_that_cannot_run_is_an_error_not_a_fallback(two_backends):
    with pytest.raises(UserError, match="'fast' cannot run on cpu: fast: cannot on cpu"):
        registry.get_backend("fast", device="cpu", strict=False)


def test_an_unknown_backend_is_an_error_that_lists_the_known():
    with pytest.raises(UserError, match="'cutlas' is unknown; expected auto or one of native, triton, cpu, reference"):
        registry.get_backend("cutlas", device="cpu", strict=False)


def test_a_recipe_may_name_every_backend_and_the_one_of_slime_is_told_apart():
    assert CHOICES["precision.backend"] == ("auto", *registry._HOMES, "te")
    with pytest.raises(UserError, match="'te' .* is for minite launch only"):
        registry.get_backend("te", device="cpu", strict=False)
