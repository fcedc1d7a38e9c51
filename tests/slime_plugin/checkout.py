"""Where the real slime and its Megatron are, for tests that run them."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import pytest

from minite.config.env import megatron_dir, slime_dir
from minite.ports import LOOPBACK, free_port

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


def in_slime(script: str, *arguments: str, ranks: int = 1) -> str:
    """The output of a script of this folder in a process of its own, which may import slime by stand_ins.

    With several ranks, in as many processes that find each other by torch's variables; the output is that of rank 0.
    """
    slime, megatron = needs_slime()
    root = str(Path(__file__).parents[2])
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(ranks),
    }
    command = [sys.executable, str(Path(__file__).with_name(script)), str(slime), str(megatron), *arguments]
    with ExitStack() as stack:
        # Files, not pipes: a rank that waits for a reader would let the others wait for it.
        texts = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2 * ranks)]
        started = [
            subprocess.Popen(
                command, env={**environment, "RANK": str(rank)}, stdout=texts[rank], stderr=texts[-1 - rank]
            )
            for rank in range(ranks)
        ]
        try:
            codes = [process.wait(timeout=280) for process in started]
        finally:
            for process in started:
                process.kill()
        for text in texts:
            text.seek(0)
        for rank, code in enumerate(codes):
            assert code == 0, f"rank {rank}:\n{texts[rank].read()[-2000:]}\n{texts[-1 - rank].read()[-6000:]}"
        return texts[0].read()
