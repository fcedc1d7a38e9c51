"""Clearing up behind a killed run; the runs of test_run.py and test_mistakes.py show the whole of it."""

from __future__ import annotations

import subprocess
import sys
import time

import psutil
import pytest

from minite.driver import undertaker


@pytest.fixture
def sleeper():
    process = subprocess.Popen(["sleep", "600"])
    yield psutil.Process(process.pid)
    process.kill()
    process.wait()


def test_it_waits_for_the_run_and_kills_only_the_process_it_was_told_of(sleeper, tmp_path):
    """A number that came round again, a process long gone, and the one meant."""
    other = psutil.Popen(["sleep", "600"])
    folder = tmp_path / "files"
    folder.mkdir()
    start = sleeper.create_time()
    reused = f"{other.pid}@{other.create_time() - 60}"
    arguments = [str(folder), reused, f"999999999@{start}", f"{sleeper.pid}@{start}"]
    waiting = subprocess.Popen([sys.executable, "-P", undertaker.__file__, *arguments], stdin=subprocess.PIPE)
    time.sleep(1)
    assert waiting.poll() is None and sleeper.status() != psutil.STATUS_ZOMBIE and folder.exists()
    waiting.communicate(timeout=60)
    assert sleeper.status() == psutil.STATUS_ZOMBIE and not folder.exists()
    assert other.status() != psutil.STATUS_ZOMBIE
    other.kill()
    other.wait()
