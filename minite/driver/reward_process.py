"""Scores responses with a recipe's own function: python reward_process.py MODULE.FUNCTION DIRECTORY

A line {"response": str, "answer": str} in, a line {"reward": number} or {"error": str} out. It is started as a file, so
that it imports nothing but the function's module, which is looked for in DIRECTORY first.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys

PR_SET_PDEATHSIG = 1  # of Linux's prctl


def main(name: str, directory: str) -> None:
    """Serve until standard input ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # a function that hangs would never see the end of input
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is for the run, which ends this process
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what the function prints is no answer
    sys.path.insert(0, directory)
    module, _, function = name.rpartition(".")
    try:
        score = getattr(importlib.import_module(module), function)
        _send(answers, {"ready": True})
    except Exception as error:
        _send(answers, {"error": _told(error)})
        return
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            _send(answers, {"reward": float(score(asked["response"], asked["answer"]))})
        except Exception as error:
            _send(answers, {"error": _told(error)})


def _told(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:300]


def _send(answers, message) -> None:  # type: ignore[no-untyped-def]
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
