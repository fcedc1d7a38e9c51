"""What the plugin must remember over a restart, beside slime's checkpoints: one line a rollout in a file of its own.

slime has no hook at its save. A line holds so little that one is written after every rollout; the one of the rollout
that the checkpoint was trained on is read again.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from minite.launch.resume import STATE, read_state
from minite.losses.triage_state import TriageState


def record(save: str | None, rollout_id: int, plan_digest: str, state: TriageState, gap_abs_mean: float) -> None:
    """Append the line of a rollout. For one process; nothing when slime saves nothing."""
    if save is None:
        return
    file = Path(save) / STATE
    file.parent.mkdir(parents=True, exist_ok=True)
    line = {"rollout": rollout_id, "plan_digest": plan_digest, **state.state_dict(), "gap_abs_mean": gap_abs_mean}
    with file.open("a", encoding="utf-8") as out:
        out.write(json.dumps(line) + "\n")


def restore(load: str, rollout_id: int, state: TriageState) -> dict[str, Any]:
    """The line of the last trained rollout, its calm put into ``state``. UserError when there is none."""
    line = read_state(load, rollout_id)
    state.load_state_dict({"calm": line["calm"]})
    return line
