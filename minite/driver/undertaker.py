"""Clears up behind a run that was killed: python undertaker.py FOLDER PID@START ...

Most of Ray goes down with the run's process, but its agents try for a minute to report that to a server which is gone
too, and nobody would remove its files. A process is known by its number and its start [s since the epoch]: numbers come
round again.
"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence

import psutil

SLACK = 2.0  # of a start time, which moves when the clock is set [s]


def main(folder: str, processes: Sequence[str]) -> None:
    """Wait for the end of standard input, which the run holds open; kill what still runs; remove the folder."""
    sys.stdin.read()
    for text in processes:
        pid, _, start = text.partition("@")
        try:
            process = psutil.Process(int(pid))
            if abs(process.create_time() - float(start)) < SLACK:
                process.kill()
        except psutil.NoSuchProcess:
            continue
    time.sleep(3)  # the actors end by themselves and may still write
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
