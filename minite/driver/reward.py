"""Rewards. A recipe's own function, and the scorers of reasoning_gym, run in a process of their own, which is ended
when it hangs and made anew."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import time
from typing import Any

from minite.config.schema import DataConfig
from minite.driver import reasoning, reward_process
from minite.driver.data import Example, score
from minite.errors import UserError

START_SECONDS = 120.0  # for the imports of a reward function
SERVED = "minite.driver.reasoning_served.score"  # by its name: importing it here would import reasoning_gym


class BadReward(Exception):
    """A response that could not be scored: its function raised, hung, died or gave no finite number."""


class Scorer:
    """``data.reward`` as a function. Raises UserError when it cannot be imported.

    ``ended``: answers over which the task's own scorer hung or died, since it was last set to 0. They are wrong ones,
    for a model must not gain by them, and no fault of the run, for which BadReward stands.
    """

    def __init__(self, config: DataConfig) -> None:
        self._config = config
        self._process: subprocess.Popen[bytes] | None = None
        self._unread = b""
        self._of_task = config.reward == "task"
        self._function = config.reward
        if self._of_task and config.kind == "reasoning_gym":
            self._function = SERVED
        self.ended = 0
        if self._function != "task":
            self._start()

    def __call__(self, example: Example, response: str) -> float:
        """The reward of a response that has ended, a finite number. Raises BadReward."""
        if self._function == "task":
            return score(example, response)
        if self._process is None:
            self._start()
        read = reasoning.packed(example.entry) if self._of_task and example.entry else example.answer
        question = json.dumps({"response": response, "answer": read}) + "\n"
        try:
            got = self._ask(question.encode(), self._config.reward_timeout)
        except BadReward:
            if not self._of_task:
                raise
            self.ended += 1
            return 0.0
        if "error" in got:
            raise BadReward(got["error"])
        if not math.isfinite(got["reward"]):
            raise BadReward(f"it returned {got['reward']}")
        return float(got["reward"])

    def close(self) -> None:
        """End its process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process, self._unread = None, b""

    def _start(self) -> None:
        name = self._function
        self._process = subprocess.Popen(
            [sys.executable, "-P", reward_process.__file__, name, os.getcwd()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            bufsize=0,
        )
        try:
            got = self._ask(b"", START_SECONDS)
        except BadReward as error:
            got = {"error": str(error)}
        if "error" in got:
            self.close()
            raise UserError(
                f"data.reward: {name} cannot be imported: {got['error']}; it is looked for in {os.getcwd()}"
            )

    def _ask(self, question: bytes, patience: float) -> dict[str, Any]:
        """One answer. A process that dies or is too slow is gone afterwards."""
        process = self._process
        assert process is not None and process.stdin is not None and process.stdout is not None
        deadline = time.monotonic() + patience
        waiting = select.poll()  # not select.select, which refuses descriptors from 1,024 on
        waiting.register(process.stdout, select.POLLIN)
        try:
            if question:
                process.stdin.write(question)
            while b"\n" not in self._unread:
                left = deadline - time.monotonic()
                if left <= 0 or not waiting.poll(left * 1e3):
                    self.close()
                    raise BadReward(f"it took longer than {patience:g} s")
                part = os.read(process.stdout.fileno(), 1 << 16)
                if not part:
                    raise BrokenPipeError
                self._unread += part
        except BrokenPipeError:
            self.close()
            raise BadReward("its process died") from None
        line, _, self._unread = self._unread.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer
