"""The arithmetic of the Triton quantizers on a CPU, in Triton's interpreter, where the package is installed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minite.backends.triton.backend import TritonBackend

ROOT = Path(__file__).parents[2]


def test_kernels_equal_the_definition_in_the_interpreter():
    pytest.importorskip("triton", reason="the Triton backend needs the package triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    script = Path(__file__).with_name("triton_interpreted.py")
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("device", "strict", "capability", "installed", "reason"),  # capability None: no GPU
    [
        ("cpu", False, (9, 0), True, "not on cpu"),
        ("cuda", True, (9, 0), True, "strict alignment"),
        ("cuda", False, (9, 0), False, "triton is not installed"),
        ("cuda", False, None, True, "no CUDA device"),
        ("cuda", False, (8, 0), True, "this GPU is sm_80"),
        ("cuda", False, (9, 0), True, None),
        ("cuda", False, (10, 3), True, None),
    ],
)
def test_refusals_name_the_reason(monkeypatch, device, strict, capability, installed, reason):
    monkeypatch.setattr("minite.backends.triton.backend.find_spec", lambda name: name if installed else None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: capability is not None)
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda: capability)
    refusal = TritonBackend.refused(device, strict)
    assert refusal is None if reason is None else reason in refusal
