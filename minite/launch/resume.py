"""Where a slime run stopped: its checkpoint, rollout, data state and the plugin's own state.

slime itself goes on from whatever lies under --load. It does not ask whether the precision is still the same, and
starts the data over without a word when its state is missing. Both are checked here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minite.config import PrecisionPlan, RunConfig
from minite.errors import UserError

STATE = "minite/state.jsonl"  # under slime.save; one line a rollout, written by slime_plugin.state
TRACKER = "latest_checkpointed_iteration.txt"


@dataclass(frozen=True)
class Resume:
    """The next rollout goes on from here."""

    rollout: int  # the last one that the checkpoint has been trained on
    state: dict[str, Any]  # the plugin's line for it


def check_new(config: RunConfig) -> None:
    """Raises UserError when slime would go on with an old run although a new one was asked for."""
    tracker = Path(config.slime.save) / TRACKER
    if tracker.exists():
        raise UserError(
            f"{config.where('slime.save')}: slime.save {config.slime.save} holds a checkpoint (iteration "
            f"{tracker.read_text().strip()}), from which slime would go on; add --resume or set another slime.save"
        )


def find(config: RunConfig, plan: PrecisionPlan) -> Resume:
    """The newest checkpoint and its states. Raises UserError for a missing part or another plan."""
    save = Path(config.slime.save)
    tracker = save / TRACKER
    try:
        rollout = int(tracker.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"slime.save: {tracker} names no checkpoint ({error}); leave --resume out to start") from None
    for what, path in (
        ("checkpoint", save / f"iter_{rollout:07d}"),
        ("data state", save / f"rollout/global_dataset_state_dict_{rollout}.pt"),
    ):
        if not path.exists():
            raise UserError(
                f"slime.save: {tracker} says {rollout}, but its {what} {path} is missing; "
                f"write an older rollout that is whole into {tracker.name}"
            )
    state = read_state(save, rollout)
    if state["plan_digest"] != plan.digest:
        raise UserError(
            f"slime.save: rollout {rollout} in {save} was trained under plan {state['plan_digest'][:12]}, the recipe "
            f"resolves to {plan.digest[:12]}; resume with the old recipe, or start anew from its weights"
        )
    return Resume(rollout, state)


def read_state(save: str | Path, rollout: int) -> dict[str, Any]:
    """The plugin's last line for a rollout: rollout, plan_digest, calm, gap_abs_mean. UserError when there is none."""
    file = Path(save) / STATE
    try:
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise UserError(f"{file} is not readable ({error}); only runs started by minite launch can resume") from None
    found: list[dict[str, Any]] = [line for line in lines if line["rollout"] == rollout]
    if not found:
        raise UserError(
            f"{file} has no line for rollout {rollout}; its last is {lines[-1]['rollout'] if lines else None}"
        )
    return found[-1]
