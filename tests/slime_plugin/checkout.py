"""Where the real slime and its Megatron are, for tests that run them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minite.config.env import megatron_dir, slime_dir

# What slime imports and miniTE does not install.
_NEEDED = ("httpx", "omegaconf", "six", "transformers", "wandb")


def needs_slime() -> tuple[Path, Path]:
    """(slime, Megatron-LM); skips the calling test, with the reason, where they are not."""
    slime, megatron = slime_dir(), megatron_dir()
    if slime is None or megatron is None:
        pytest.skip("needs MINITE_SLIME_DIR and MINITE_MEGATRON_DIR: checkouts of slime and of the Megatron-LM it pins")
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"slime needs {', '.join(missing)}")
    return slime, megatron


def in_slime(script: str, *arguments: str) -> str:
    """The output of a script of this folder in a process of its own, which may import slime by stand_ins."""
    slime, megatron = needs_slime()
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, str(Path(__file__).with_name(script)), str(slime), str(megatron), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment)
    assert done.returncode == 0, f"{done.stdout[-2000:]}\n{done.stderr[-6000:]}"
    return done.stdout
