"""A recipe whose run takes seconds, and what tests read of a run: its lines, its processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from minite.config import RunConfig, load_recipe

ROOT = Path(__file__).parents[2]
STEPS = 5

# One-digit sums: after 12 supervised steps some answers are right and some wrong, so groups have a signal.
RECIPE = f"""\
name: tiny
model:
  kind: qwen3_moe
  num_layers: 2
  hidden_size: 32
  num_heads: 2
  num_kv_heads: 2
  head_dim: 16
  vocab_size: 32
  num_experts: 4
  experts_per_token: 2
  moe_intermediate_size: 32
  max_seq_len: 32
  init_std: 0.1
precision:
  formats:
    w4a4: {{weight: nvfp4_1d, input: nvfp4_row}}
  rules:
    - {{match: "model.layers.*.mlp.gate", use: bf16}}
    - {{match: "model.layers.**", use: w4a4}}
    - {{match: "**", use: bf16}}
data: {{max_operand: 4, heldout: 6}}
warm_start: {{steps: 12, batch_size: 32}}
learner: {{lr: 1.0e-3}}
sampler: {{max_new_tokens: 4, kv_tokens: 1024}}
algo: {{prompts_per_step: 4, group_size: 4, minibatches: 2}}
driver: {{steps: {STEPS}, checkpoint_every: 2, eval_every: 1, tensorboard: false}}
"""
STRICT = "precision.alignment=strict"


def recipe(folder: Path, text: str = RECIPE) -> Path:
    """The recipe as a file."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "tiny.yaml"
    path.write_text(text)
    return path


def config(folder: Path, *overrides: str) -> RunConfig:
    return load_recipe(recipe(folder), overrides)


def lines(run_dir: Path) -> list[dict[str, Any]]:
    """metrics.jsonl without what a clock measured."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if not k.startswith(("time/", "sync/"))} for r in records]


def files(folder: Path) -> list[str]:
    """Names in a folder, hidden ones too."""
    return sorted(path.name for path in folder.iterdir())


def environment(cache: Path) -> dict[str, str]:
    """For processes that run minite from the source tree with a cache of their own."""
    return {**os.environ, "MINITE_CACHE_DIR": str(cache), "PYTHONPATH": str(ROOT)}


def start(folder: Path, module: str, *arguments: str) -> subprocess.Popen[str]:
    """python -m MODULE in ``folder``, in a process group of its own, like a command typed at a terminal.

    A shell makes its background jobs ignore Ctrl-C, and their children inherit that: tests in such a job undo it.
    """
    folder.mkdir(exist_ok=True)
    return subprocess.Popen(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=environment(folder.parent / "cache"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def left_running(folder: Path, patience: float = 60.0) -> list[str]:
    """Processes that still run with ``folder`` as their working directory, which all of Ray inherits, after a while."""
    deadline = time.monotonic() + patience
    while (found := _running_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


def _running_in(folder: Path) -> list[str]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(folder.resolve()):
                found.append((process / "cmdline").read_text().replace("\0", " ").strip() or process.name)
        except OSError:
            continue  # it has just ended, or is another user's
    return found
