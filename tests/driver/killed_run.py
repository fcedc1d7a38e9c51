"""`minite` that kills itself in the middle of a step: python -m tests.driver.killed_run N train RECIPE ...

The prompts of every optimizer step go to trained.jsonl. After optimizer step N the learner has new weights which
neither the samplers nor the run directory know of; then comes SIGKILL.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from minite import cli
from minite.driver.actors import LearnerGroup


def main(kill_after: int, arguments: list[str]) -> int:
    original, seen = LearnerGroup.train_step, []

    def train_step(self: LearnerGroup, batch: Any, *args: float) -> dict[str, float]:
        result = original(self, batch, *args)
        seen.append(batch.group_S.tolist())
        with Path("trained.jsonl").open("a") as file:
            file.write(json.dumps(seen[-1]) + "\n")
        if len(seen) == kill_after:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    LearnerGroup.train_step = train_step
    return cli.main(arguments)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
