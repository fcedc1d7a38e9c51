"""The import hook touches megatron and nothing else."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from minite.learner import cpu_compat

PROBE = """
import sys, torch
from minite.learner import cpu_compat
before = dict(vars(torch)), dict(vars(torch.cuda))
cpu_compat.install("cpu")
cpu_compat.install("cpu")  # a second call adds nothing
import megatron.core.tensor_parallel.random as rng, megatron.core.jit as jit
after = dict(vars(torch)), dict(vars(torch.cuda))
changed = [k for old, new in zip(before, after) for k in old if old[k] is not new.get(k)]
hooks = sum(type(f).__module__ == cpu_compat.__name__ for f in sys.meta_path)
print(hooks, changed, rng._set_cuda_rng_state.__module__, jit.jit_fuser.__name__)
"""


def test_hook_is_installed_once_and_leaves_torch_alone():
    run = subprocess.run([sys.executable, "-W", "ignore", "-c", PROBE], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "1 [] minite.learner.cpu_compat noop_decorator"


def test_no_hook_with_cuda():
    before = list(sys.meta_path)
    cpu_compat.install("cuda")
    assert sys.meta_path == before


def test_hook_comes_too_late_after_megatron(monkeypatch):
    monkeypatch.setitem(sys.modules, "megatron.core", torch)
    monkeypatch.setattr(sys, "meta_path", [f for f in sys.meta_path if not isinstance(f, cpu_compat._Finder)])
    with pytest.raises(RuntimeError, match=r"before .*cpu_compat\.install"):
        cpu_compat.install("cpu")
