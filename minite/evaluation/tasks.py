"""The table of tasks. A new task is one file with a function of this form, and one row."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from minite.config.build import nearest
from minite.errors import UserError
from minite.evaluation.greedy import greedy
from minite.evaluation.harness import PREFIX, harness_task
from minite.evaluation.heldout import heldout
from minite.evaluation.outcome import Outcome, Tell
from minite.evaluation.subject import Subject
from minite.evaluation.text import text

Task = Callable[[Subject, Tell], Outcome]

TASKS: dict[str, Task] = {"text": text, "greedy": greedy, "heldout": heldout}


def find(names: Sequence[str], limit: int | None = None) -> dict[str, Task]:
    """Tasks by name; those of lm-eval with their data, ``limit`` items at most. UserError for an unknown one."""
    if limit is not None and not any(name.startswith(PREFIX) for name in names):
        raise UserError(f"--limit: only tasks of lm-eval take it, got --tasks {' '.join(names)}; remove it")
    found: dict[str, Task] = {}
    for name in names:
        if name.startswith(PREFIX):
            found[name] = harness_task(name, limit)
        elif name in TASKS:
            found[name] = TASKS[name]
        else:
            raise UserError(
                f"--tasks: {name!r} is no task; expected some of {', '.join(TASKS)}, {PREFIX}NAME; "
                f"{nearest(name, TASKS)}"
            )
    return found
