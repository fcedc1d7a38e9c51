"""The faults of scripts/fault_campaign.py. Each is done to a run from outside: by signals, limits and files."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
from fault_run import ROOT, Running

from minite.driver import checkpoint

SMALL = 4096  # largest file that a learner on a full disk can write [bytes]


@dataclass(frozen=True)
class Fault:
    """``do`` returns when the fault is in force; from then on the recovery is timed."""

    name: str
    do: Callable[[Running], None]
    said: str  # what the run's log must then say, as a regular expression: it did happen
    same_numbers: bool = True  # a repaired run trains on the same rollouts


def _signal(kind: str, what: signal.Signals) -> Callable[[Running], None]:
    return lambda run: run.actor(kind).send_signal(what)


def _kill_driver(run: Running) -> None:
    run.process.kill()
    run.process.wait()
    run.go_on()


def _bad_reward(how: str) -> Callable[[Running], None]:
    return lambda run: run.write("bad_reward", how)


def _full_disk(run: Running) -> None:
    """The learner's files end at SMALL bytes, as they do where there is no room, until a checkpoint has failed."""
    learner, mark = run.actor("_Learner"), run.mark()
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, (SMALL, resource.RLIM_INFINITY))
    try:
        run.wait(lambda: run.says("tries again", mark), "a checkpoint that fails")
    finally:
        if learner.is_running():
            resource.prlimit(learner.pid, resource.RLIMIT_FSIZE, unlimited)


def _damage(spoil: Callable[[bytes], bytes]) -> Callable[[Running], None]:
    """Spoil the largest file of the newest checkpoint, and kill the learner, so that it is read."""

    def do(run: Running) -> None:
        run.wait(lambda: len(checkpoint.list_checkpoints(run.run_dir)) > 1, "two checkpoints")
        learner = run.actor("_Learner")
        learner.suspend()
        time.sleep(0.5)  # what it has written the driver may still be closing; nothing newer comes now
        newest = checkpoint.list_checkpoints(run.run_dir)[-1]
        path = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
        path.write_bytes(spoil(path.read_bytes()))
        learner.kill()

    return do


def _flipped(data: bytes) -> bytes:
    at = len(data) // 2
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def _cut_sync(victim: str) -> Callable[[Running], None]:
    """Kill a process while the sampler loads weights."""

    def do(run: Running) -> None:
        sampler, other = run.actor("_Sampler"), run.actor(victim)
        title = Path(f"/proc/{sampler.pid}/cmdline")
        deadline = time.monotonic() + run.patience
        while b"_Sampler.update" not in title.read_bytes():
            if time.monotonic() > deadline or not run.alive:
                raise TimeoutError("no weight sync was seen")
            os.sched_yield()
        other.kill()

    return do


def _full_store(run: Running) -> None:
    """Another process fills Ray's object store and holds it until Ray has said so and the run is a step further."""
    raylet = next(p for p in psutil.Process(run.process.pid).children(recursive=True) if p.name() == "raylet")
    options = {word.partition("=")[0]: word.partition("=")[2] for word in raylet.cmdline()}
    log = Path(options["--log_dir"]) / "raylet.out"
    command = [sys.executable, str(ROOT / "scripts" / "fault_hog.py"), options["--gcs-address"]]
    hog = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert hog.stdout is not None
        if hog.stdout.readline() != "full\n":
            raise RuntimeError("the object store could not be filled")
        mark = log.stat().st_size
        run.wait(lambda: _line_of(log, _FULL, mark) is not None, "Ray says that its object store is full")
        run.wait_for_step(run.furthest + 1)
        run.write("log.txt", f"{_line_of(log, _FULL, mark)}\n", append=True)
    finally:
        hog.communicate("")


def _line_of(log: Path, pattern: str, mark: int) -> str | None:
    """The last line after ``mark`` that has ``pattern``."""
    lines = log.read_bytes()[mark:].decode(errors="replace").splitlines()
    return next((line for line in reversed(lines) if re.search(pattern, line)), None)


_FULL = r"spilling because current usage [1-9]\d\d[.%]"  # Ray's own words, and its measure: 100 % or more
_DIED = "process died|could not share"
FAULTS = {
    fault.name: fault
    for fault in (
        Fault("sampler killed", _signal("_Sampler", signal.SIGKILL), _DIED),
        Fault("learner killed", _signal("_Learner", signal.SIGKILL), _DIED),
        Fault("driver killed", _kill_driver, "resuming from"),
        Fault("sampler hangs", _signal("_Sampler", signal.SIGSTOP), "did not answer"),
        Fault("learner hangs", _signal("_Learner", signal.SIGSTOP), "did not answer"),
        Fault("reward raises", _bad_reward("raise"), "ZeroDivisionError", same_numbers=False),
        Fault("reward hangs", _bad_reward("hang"), "took longer than", same_numbers=False),
        Fault("reward is NaN", _bad_reward("nan"), "returned nan", same_numbers=False),
        Fault("checkpoint unwritable", _full_disk, "tries again"),
        Fault("checkpoint truncated", _damage(lambda data: data[:-100]), "damaged checkpoint"),
        Fault("checkpoint bit flipped", _damage(_flipped), "damaged checkpoint"),
        Fault("object store full", _full_store, _FULL),
        Fault("sync cut: sampler killed", _cut_sync("_Sampler"), _DIED),
        Fault("sync cut: learner killed", _cut_sync("_Learner"), _DIED),
    )
}
