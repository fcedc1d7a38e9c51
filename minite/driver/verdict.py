"""What the recipe says of a step that is not as it should be: it is said, and the run stops, skips or goes on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from minite.errors import UserError


def obey(choice: str, key: str, what: str, run_dir: Path, note: Callable[[str], None]) -> None:
    """``what`` is wrong: the value of the recipe's ``key``, ``choice``, says stop (UserError), skip or warn."""
    if choice == "stop":
        raise UserError(
            f"{what}; stopped as {key} says. The newest checkpoint is intact: 'minite resume {run_dir}' goes on from "
            "it, with other settings if you give some"
        )
    note(f"{what}; {'skipped' if choice == 'skip' else 'going on'}, as {key} says")


def of_gradients(step: int, names: Sequence[str]) -> str:
    """Names of the parameters whose gradients are no numbers, in words."""
    more = f" and of {len(names) - 1} more" if len(names) > 1 else ""
    return f"step {step}: the gradient of {names[0]}{more} is not finite"
