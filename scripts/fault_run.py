"""One run of scripts/fault_campaign.py: a `minite train` of its own, seen through its files, and what it must leave."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import torch

from minite.driver import checkpoint

ROOT = Path(__file__).parents[1]
NOT_COMPARED = ("time/", "recovery/", "sync/")
BATCH, MINIBATCHES = 4, 2  # prompts and optimizer steps of a step in fault_campaign.yaml


class Stopped(Exception):
    """The campaign's time is over."""


class Running:
    """`minite train` in ``folder``, and its resumes."""

    def __init__(self, folder: Path, settings: Sequence[str], patience: float, stop: threading.Event) -> None:
        self.folder, self.run_dir, self.patience, self._stop = folder, folder / "run", patience, stop
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        options = [word for setting in settings for word in ("-o", setting)]
        self.furthest = 0
        self._start("train", str(ROOT / "scripts" / "fault_campaign.yaml"), "--run-dir", "run", *options)

    def _start(self, *arguments: str) -> None:
        paths = [str(ROOT), str(ROOT / "scripts"), *filter(None, [os.environ.get("PYTHONPATH")])]
        changes = {
            "PYTHONPATH": os.pathsep.join(paths),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "MINITE_CACHE_DIR": str(self.folder.parent / "cache"),
        }
        with (self.folder / "log.txt").open("a") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "minite.cli", *arguments],
                cwd=self.folder,
                env={**os.environ, **changes},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def go_on(self, *options: str) -> None:
        self._start("resume", "run", *options)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def actor(self, kind: str) -> psutil.Process:
        """The process of an actor class, which Ray writes into its title."""
        found: list[psutil.Process] = []

        def look() -> bool:
            found[:] = [p for p in psutil.Process(self.process.pid).children(recursive=True) if _is(p, kind)]
            return bool(found)

        self.wait(look, f"a process of {kind}")
        return found[0]

    def write(self, name: str, text: str, append: bool = False) -> None:
        with (self.folder / name).open("a" if append else "w") as file:
            file.write(text)

    def mark(self) -> int:
        """The present end of the log."""
        return (self.folder / "log.txt").stat().st_size

    def says(self, pattern: str, mark: int) -> bool:
        return re.search(pattern, (self.folder / "log.txt").read_bytes()[mark:].decode(errors="replace")) is not None

    def step(self) -> int:
        """Of the newest line; lines are taken back when a run goes back."""
        with suppress(OSError, ValueError, IndexError, KeyError), (self.run_dir / "metrics.jsonl").open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 65536, 0))
            step: int = json.loads(file.read().rpartition(b"\n")[0].rpartition(b"\n")[2])["step"]
            self.furthest = max(self.furthest, step)
            return step
        return -1

    def wait(self, for_what: Callable[[], bool], words: str) -> None:
        """Raises TimeoutError, also when the run ends first, and Stopped."""
        deadline = time.monotonic() + self.patience
        while not for_what():
            if self._stop.is_set():
                raise Stopped
            if not self.alive and not for_what():
                raise TimeoutError(f"the run ended (exit code {self.process.returncode}) before {words}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{words} did not come within {self.patience:g} s")
            time.sleep(0.05)

    def wait_for_step(self, step: int) -> None:
        """However long it takes, as long as there is some progress."""
        while self.step() < step:
            before = self.furthest
            self.wait(lambda before=before: self.step() >= step or self.furthest > before, f"step {before + 1}")

    def wait_for_end(self) -> int:
        """The exit code."""
        while self.alive:
            before = self.furthest
            self.wait(lambda before=before: not self.alive or self.step() > before, "the end of the run")
        return self.process.wait()

    def end(self) -> None:
        if self.alive:
            self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()

    def lines(self) -> list[dict[str, Any]]:
        """metrics.jsonl without what a clock measured or a repair counted."""
        records = [json.loads(line) for line in (self.run_dir / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in record.items() if not k.startswith(NOT_COMPARED)} for record in records]


def problems(run: Running, steps: int, reference: list[dict[str, Any]] | None) -> list[str]:
    """What is wrong with a run that has ended; empty for a good one. Takes it a step further at last."""
    lines = run.lines()
    if [line["step"] for line in lines] != list(range(steps + 1)):
        return [f"metrics.jsonl holds {len(lines)} lines, expected one each for the steps 0 to {steps}"]
    found = []
    if reference is not None and lines != reference:
        first = next(i for i, (a, b) in enumerate(zip(lines, reference, strict=True)) if a != b)
        found.append(f"line {first} differs from that of the run without faults")
    mixed = [line["step"] for line in lines[1:] if line["gap/abs_max"] > 1e-8 or line["policy_lag/max"] != 0]
    if mixed:
        found.append(f"steps {mixed[:5]}: tokens of other weights (gap/abs_max above 1e-8 or a policy lag)")
    newest, damaged = checkpoint.newest_valid(run.run_dir)
    if newest != checkpoint.checkpoint_dir(run.run_dir, steps):
        return [*found, f"the newest whole checkpoint is {newest}; damaged: {damaged}"]
    found += _miscounted(lines, newest, steps)
    run.go_on("-o", f"driver.steps={steps + 1}")
    code = run.wait_for_end()
    if code != 0 or run.lines()[:-1] != lines or run.step() != steps + 1:
        found.append(f"the last checkpoint does not lead a step further (exit code {code})")
    return found + _left(run.folder)


def _miscounted(lines: list[dict[str, Any]], newest: Path, steps: int) -> list[str]:
    """Prompts issued, trained on and dropped, and optimizer steps, as the checkpoint and the lines have them."""
    found = []
    count = checkpoint.read_state(newest)["rollouts"]["buffer"]
    sampled = sum(line["rollout/groups"] + line.get("reward/failed_groups", 0) for line in lines[1:])
    if not count["issued"] == count["trained"] + count["dropped"] == count["last_id"] + 1 == sampled:
        found.append(f"prompts were lost or used twice: {count}, in the lines {sampled:g}")
    if count["trained"] != steps * BATCH:
        found.append(f"{count['trained']} prompts were trained on, expected {steps * BATCH}")
    done = torch.load(newest / "common.pt", weights_only=True)["step"]
    if done != steps * MINIBATCHES:
        found.append(f"{done} optimizer steps, expected {steps * MINIBATCHES}")
    return found


def _left(folder: Path) -> list[str]:
    """Processes that still run in ``folder`` after a while."""
    deadline = time.monotonic() + 90
    while (names := _running_in(folder)) and time.monotonic() < deadline:
        time.sleep(0.5)
    return [f"still running: {name}" for name in names]


def _running_in(folder: Path) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd() == str(folder.resolve()):
                found.append(" ".join(process.cmdline())[:80])
    return found


def _is(process: psutil.Process, kind: str) -> bool:
    with suppress(psutil.Error):
        return process.status() != psutil.STATUS_STOPPED and " ".join(process.cmdline()).startswith(f"ray::{kind}")
    return False
