"""The table of tasks. A new task is one file with a function of this form, and one row."""

from __future__ import annotations

from collections.abc import Callable

from minite.evaluation.greedy import greedy
from minite.evaluation.heldout import heldout
from minite.evaluation.outcome import Outcome, Tell
from minite.evaluation.subject import Subject
from minite.evaluation.text import text

Task = Callable[[Subject, Tell], Outcome]

TASKS: dict[str, Task] = {"text": text, "greedy": greedy, "heldout": heldout}
