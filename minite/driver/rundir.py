"""The directory that a run lives in: everything needed to go on with it is inside.

RUN/config.json  plan.json  metrics.jsonl  checkpoints/  start/ (weights the run began with)  report.html
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from minite.config import PrecisionPlan, RunConfig, config_from_dict, config_to_dict, resolve_plan
from minite.config.build import nearest
from minite.driver.metrics import METRICS_FILE
from minite.errors import UserError

CONFIG, PLAN, START = "config.json", "plan.json", "start"


def create(run_dir: Path, config: RunConfig, plan: PrecisionPlan) -> None:
    """Make a new run directory. Raises UserError when there is something in it already."""
    if run_dir.exists() and (not run_dir.is_dir() or any(run_dir.iterdir())):
        raise UserError(
            f"run directory {run_dir} is not empty: go on with 'minite resume {run_dir}' or give another --run-dir"
        )
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _write(run_dir / PLAN, plan.to_json())
        _write(run_dir / CONFIG, config_to_dict(config))
    except OSError as error:
        raise UserError(f"run directory {run_dir} cannot be written: {error}; give another --run-dir") from None


def remove_unstarted(run_dir: Path) -> None:
    """Remove what `create` made when the run ended before its first line, so that the same command can come again."""
    metrics = run_dir / METRICS_FILE
    if not metrics.exists() or metrics.stat().st_size == 0:
        shutil.rmtree(run_dir)


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold a run directory; the lock ends with the process. Raises UserError when another process holds it."""
    descriptor = os.open(run_dir, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(f"{run_dir}: another process is running it; wait for it or stop it first") from None
        yield
    finally:
        os.close(descriptor)


def load(run_dir: Path, overrides: Sequence[str] = ()) -> tuple[RunConfig, PrecisionPlan]:
    """The configuration of a run, with ``-o`` overrides, and its plan. The plan must still be the one it began with."""
    config = config_from_dict(json.loads(_read(run_dir, CONFIG)), str(run_dir / CONFIG), overrides)
    saved = PrecisionPlan.from_json(_read(run_dir, PLAN), str(run_dir / PLAN))
    plan = resolve_plan(config)
    if plan.digest != saved.digest:
        raise UserError(
            f"{run_dir}: the plan now resolves to digest {plan.digest[:12]}, the run began with "
            f"{saved.digest[:12]}: a run keeps its model and precision; start a new run to change them"
        )
    return config, plan


def record_switch(run_dir: Path, step: int, plan: PrecisionPlan) -> None:
    """The plan in force after ``step``, beside the one the run began with. A resume takes it from the checkpoint."""
    _write(run_dir / f"plan.step_{step:08d}.json", plan.to_json())


def keep(run_dir: Path, config: RunConfig) -> None:
    """Overrides given to a resumed run hold for the next resume too."""
    _write(run_dir / CONFIG, config_to_dict(config))


def _read(run_dir: Path, name: str) -> str:
    path = run_dir / name
    try:
        text = path.read_text(encoding="utf-8")
        json.loads(text)
        return text
    except FileNotFoundError:
        beside = run_dir.parent
        runs = sorted(p.name for p in beside.iterdir() if (p / CONFIG).is_file()) if beside.is_dir() else []
        raise UserError(
            f"{run_dir} is not a run directory: no {name}; expected what 'minite train' made; in {beside}: "
            f"{nearest(run_dir.name, runs)}"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None


def _write(path: Path, data: Any) -> None:
    """Whole or not at all, also when the process dies meanwhile."""
    aside = path.with_name(path.name + ".part")
    aside.write_text(json.dumps(data, indent=1) if not isinstance(data, str) else data, encoding="utf-8")
    os.replace(aside, path)
