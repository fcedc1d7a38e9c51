"""Checkpoints that are whole or absent: written aside, checksummed, renamed; the newest one that verifies is taken.

    RUN/checkpoints/step_00000020/
        MANIFEST.json       step, and size and SHA-256 of every other file
        state.json          the driver's state; tensors stand in it by name
        state.safetensors   those tensors
        ...                 whatever ``save_fn`` wrote (the learner's distributed checkpoint)

The driver's own state is JSON and safetensors, not pickle: reading it runs no code from it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from minite.errors import DiskError, UserError
from minite.sync.tensor_file import save_tensors

FOLDER = "checkpoints"
MANIFEST = "MANIFEST.json"
_STATE, _TENSORS = "state.json", "state.safetensors"
_TENSOR_MARK = "__tensor__"
_ANOTHER = "remove this checkpoint and resume from an older one"
RUN_STATE = {"step": int, "weight_digest": str, "plan_digest": str, "triage": dict, "watch": dict, "rollouts": dict}
_ASIDE = ".aside-"  # prefix of folders being written or removed


def write_checkpoint(run_dir: Path, step: int, save_fn: Callable[[Path], None], state: dict[str, Any]) -> Path:
    """Write the checkpoint of ``step`` and return its folder.

    save_fn: writes the large parts into the empty folder it is given. state: nested dicts and lists of JSON values and
    tensors. Until the last rename the folder has another name, so a process killed at any time leaves no half
    checkpoint. A failure removes what was written, leaves older checkpoints alone, and is a DiskError when the disk
    was the cause.
    """
    final = checkpoint_dir(run_dir, step)
    aside = final.with_name(_ASIDE + final.name)
    try:
        _clear_aside(final.parent)
        aside.mkdir(parents=True)
        save_fn(aside)
        _write_state(aside, state)
        _write_manifest(aside, step)
        if final.exists():  # a damaged one that a resumed run has reached again
            _remove(final)
        aside.rename(final)
        _sync(final.parent)
    except BaseException as error:
        shutil.rmtree(aside, ignore_errors=True)
        if isinstance(error, OSError | DiskError):
            raise DiskError(
                f"checkpoint of step {step} in {final.parent}: {error}; earlier checkpoints are intact: make room or "
                "rights there, then go on with minite resume"
            ) from error
        raise
    return final


def newest_valid(run_dir: Path) -> tuple[Path | None, list[str]]:
    """(folder of the newest checkpoint that verifies or None, one line for each newer one that is damaged)."""
    damaged = []
    for folder in reversed(list_checkpoints(run_dir)):
        reason = find_damage(folder)
        if reason is None:
            return folder, damaged
        damaged.append(f"{folder}: {reason}; skipped")
    return None, damaged


def choose(run_dir: Path, note: Callable[[str], None]) -> Path | None:
    """The checkpoint to go on from; None when there is none yet. Raises UserError when all are damaged."""
    folder, damaged = newest_valid(run_dir)
    for line in damaged:
        note(f"damaged checkpoint {line}")
    if folder is None and damaged:
        raise UserError(f"{run_dir}: every checkpoint is damaged; start a new run, or put one back from a copy")
    return folder


def shown(folder: Path | None) -> str:
    """What `choose` gave, in words."""
    return folder.name if folder else "the start: there is no checkpoint yet"


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Folders of all finished checkpoints, oldest first, unverified."""
    return sorted((run_dir / FOLDER).glob("step_[0-9]*"))


def checkpoint_dir(run_dir: Path, step: int) -> Path:
    return run_dir / FOLDER / f"step_{step:08d}"


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def find_damage(folder: Path) -> str | None:
    """Compare every file with the manifest. None when all is well, else what differs first."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        files: dict[str, dict[str, Any]] = manifest["files"]
        if manifest["step"] != step_of(folder):
            return f"{MANIFEST} is that of step {manifest['step']}"
        for name, wanted in files.items():
            path = folder / name
            if not path.is_file():
                return f"{name} is missing"
            if path.stat().st_size != wanted["bytes"]:
                return f"{name} has {path.stat().st_size} bytes, expected {wanted['bytes']}"
            if _sha256(path) != wanted["sha256"]:
                return f"{name} differs from its SHA-256"
    except FileNotFoundError:
        return f"{MANIFEST} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        return f"{MANIFEST} or a file it names cannot be read ({type(error).__name__}: {error})"
    return None if _STATE in files else f"{MANIFEST} does not name {_STATE}"


def read_state(folder: Path) -> dict[str, Any]:
    """The ``state`` given to write_checkpoint: equal values, tensors with equal bytes."""
    tensors = load_file(folder / _TENSORS) if (folder / _TENSORS).exists() else {}
    state: dict[str, Any] = _join_tensors(json.loads((folder / _STATE).read_text()), tensors)
    return state


def read_run_state(folder: Path) -> dict[str, Any]:
    """The state of a run. Raises UserError for one that has not the parts of ours, though it fits its manifest."""
    try:
        state = read_state(folder)
    except (OSError, ValueError, KeyError, RecursionError, SafetensorError) as error:
        raise UserError(f"{folder}: {_STATE} cannot be read ({type(error).__name__}: {error}); {_ANOTHER}") from None
    for key, kind in RUN_STATE.items():
        if not isinstance(state, dict) or not isinstance(state.get(key), kind):
            raise UserError(f"{folder}: {_STATE} has no '{key}' of type {kind.__name__}; {_ANOTHER}")
    return state


def prune(run_dir: Path, keep: int) -> None:
    """Remove all but the newest ``keep`` checkpoints."""
    if keep < 1:
        raise ValueError(f"keep is {keep}, expected at least 1")
    for folder in list_checkpoints(run_dir)[:-keep]:
        _remove(folder)


def _write_state(folder: Path, state: dict[str, Any]) -> None:
    tensors: dict[str, Tensor] = {}
    tree = _split_tensors(state, "state", tensors)
    if tensors:
        save_tensors(folder / _TENSORS, tensors)
    (folder / _STATE).write_text(json.dumps(tree, indent=1))


def _split_tensors(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    """A copy of the tree with {_TENSOR_MARK: name} in place of each tensor; raises TypeError for anything not JSON."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach().cpu().contiguous().clone()  # safetensors refuses shared storage
        return {_TENSOR_MARK: path}
    if isinstance(value, dict):
        bad = [key for key in value if not isinstance(key, str) or key == _TENSOR_MARK]
        if bad:
            raise TypeError(f"{path}: key {bad[0]!r} does not survive JSON")
        return {key: _split_tensors(item, f"{path}.{key}", tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_split_tensors(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    raise TypeError(f"{path}: {type(value).__name__} does not survive JSON")


def _join_tensors(value: Any, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR_MARK}:
            return tensors[value[_TENSOR_MARK]]
        return {key: _join_tensors(item, tensors) for key, item in value.items()}
    if isinstance(value, list):
        return [_join_tensors(item, tensors) for item in value]
    return value


def _write_manifest(folder: Path, step: int) -> None:
    """Flush every file to the disk and note its size and checksum."""
    paths = sorted(p for p in folder.rglob("*") if p.is_file())
    files = {}
    for path in paths:
        _sync(path)
        files[path.relative_to(folder).as_posix()] = {"bytes": path.stat().st_size, "sha256": _sha256(path)}
    (folder / MANIFEST).write_text(json.dumps({"step": step, "files": files}, indent=1))
    for path in (folder / MANIFEST, *(p for p in folder.rglob("*") if p.is_dir()), folder):
        _sync(path)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove(folder: Path) -> None:
    """Rename first: a process killed while deleting must not leave what looks like a damaged checkpoint."""
    aside = folder.with_name(_ASIDE + "old-" + folder.name)
    shutil.rmtree(aside, ignore_errors=True)
    folder.rename(aside)
    shutil.rmtree(aside)


def _clear_aside(parent: Path) -> None:
    """Remove what killed processes left behind."""
    for folder in parent.glob(_ASIDE + "*"):
        shutil.rmtree(folder)
