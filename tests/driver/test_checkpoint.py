"""Checkpoints under every kind of damage: the newest whole one is found, others are named and left alone."""

from __future__ import annotations

import errno
import math
import random
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minite.driver.checkpoint import (
    MANIFEST,
    checkpoint_dir,
    find_damage,
    list_checkpoints,
    newest_valid,
    prune,
    read_state,
    step_of,
    write_checkpoint,
)
from minite.errors import UserError


def save_parts(folder: Path) -> None:
    """Stands for the learner: files in the folder and below it."""
    (folder / "learner").mkdir()
    (folder / "learner" / "weights.bin").write_bytes(bytes(range(256)) * 40)
    (folder / "learner" / "empty").write_bytes(b"")


def write(run_dir: Path, *steps: int) -> list[Path]:
    return [write_checkpoint(run_dir, step, save_parts, {"step": step}) for step in steps]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def test_newest_is_found_and_holds_what_was_written(tmp_path: Path) -> None:
    assert newest_valid(tmp_path) == (None, [])
    write(tmp_path, 5, 20, 100)
    newest, damaged = newest_valid(tmp_path)
    assert newest == checkpoint_dir(tmp_path, 100) and damaged == []
    assert step_of(newest) == 100 and read_state(newest) == {"step": 100}
    assert (newest / "learner" / "weights.bin").read_bytes() == bytes(range(256)) * 40


def test_state_survives_to_the_last_bit(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    base = torch.randn(6, 4, generator=generator)
    state: dict[str, Any] = {
        "numbers": [0.1, 1e-300, -0.0, math.inf, 2**70, True, None, "text"],
        "rng": generator.get_state(),
        "nested": {"a": [{"t": base.double() / 3}, base.t()], "b": {}},
        "views": [base[:2], base[2:], base[:2]],
        "half": base.bfloat16(),
        "scalar": torch.tensor(7),
    }
    saved = read_state(write_checkpoint(tmp_path, 1, save_parts, state))
    assert repr(saved["numbers"]) == repr(state["numbers"])
    assert torch.equal(saved["rng"], state["rng"])
    assert torch.equal(saved["nested"]["a"][0]["t"], base.double() / 3) and saved["nested"]["b"] == {}
    assert torch.equal(saved["nested"]["a"][1], base.t())
    assert all(torch.equal(a, b) for a, b in zip(saved["views"], state["views"], strict=True))
    assert torch.equal(saved["half"], base.bfloat16()) and saved["half"].dtype == torch.bfloat16
    assert saved["scalar"].shape == ()


@pytest.mark.parametrize("value", [(1, 2), {3: 4}, {1.5}, Path("x"), {"__tensor__": 1}])
def test_state_that_would_change_on_the_way_is_refused(tmp_path: Path, value: object) -> None:
    with pytest.raises(TypeError, match=r"state.deep.0: .* does not survive JSON"):
        write_checkpoint(tmp_path, 1, save_parts, {"deep": [value]})
    assert newest_valid(tmp_path) == (None, [])


def truncate(folder: Path) -> None:
    path = folder / "learner" / "weights.bin"
    path.write_bytes(path.read_bytes()[:-1])


def flip_bit(folder: Path) -> None:
    path = folder / "learner" / "weights.bin"
    data = bytearray(path.read_bytes())
    data[4321] ^= 1
    path.write_bytes(data)


def cut_manifest(folder: Path) -> None:
    path = folder / MANIFEST
    path.write_text(path.read_text()[:-9])


def copy_from_another_step(folder: Path) -> None:
    other = folder.with_name("step_00000001") / MANIFEST
    (folder / MANIFEST).write_text(other.read_text())


DAMAGE: list[tuple[Callable[[Path], object], str]] = [
    (truncate, r"learner/weights.bin has 10239 bytes, expected 10240"),
    (flip_bit, r"learner/weights.bin differs from its SHA-256"),
    (lambda f: (f / "learner" / "empty").unlink(), r"learner/empty is missing"),
    (lambda f: (f / "state.json").write_text('{"step": 4}'), r"state.json differs|state.json has"),
    (lambda f: (f / MANIFEST).unlink(), r"MANIFEST.json is missing"),
    (cut_manifest, r"MANIFEST.json .*cannot be read \(JSONDecodeError"),
    (lambda f: (f / MANIFEST).write_bytes(b"\xff\xfe"), r"MANIFEST.json .*cannot be read \(UnicodeDecodeError"),
    (lambda f: (f / MANIFEST).write_text("[]"), r"MANIFEST.json .*cannot be read \(TypeError"),
    (lambda f: (f / MANIFEST).write_text('{"step": 3, "files": {}}'), r"does not name state.json"),
    (copy_from_another_step, r"MANIFEST.json is that of step 1"),
]


@pytest.mark.parametrize(("spoil", "message"), DAMAGE)
def test_a_damaged_checkpoint_is_named_and_skipped(
    tmp_path: Path, spoil: Callable[[Path], object], message: str
) -> None:
    _, second, third = write(tmp_path, 1, 2, 3)
    spoil(third)
    newest, damaged = newest_valid(tmp_path)
    assert newest == second
    assert len(damaged) == 1 and damaged[0].startswith(f"{third}: ")
    assert re.search(message, damaged[0])


def test_any_flipped_bit_anywhere_is_noticed(tmp_path: Path) -> None:
    (folder,) = write(tmp_path, 3)
    rng = random.Random(0)
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name != MANIFEST and p.stat().st_size]
    for _ in range(40):
        path = rng.choice(files)
        whole = path.read_bytes()
        broken = bytearray(whole)
        broken[rng.randrange(len(broken))] ^= 1 << rng.randrange(8)
        path.write_bytes(broken)
        assert find_damage(folder) == f"{path.relative_to(folder)} differs from its SHA-256"
        path.write_bytes(whole)
    assert find_damage(folder) is None


def test_all_damaged_gives_none_and_names_all(tmp_path: Path) -> None:
    for folder in write(tmp_path, 1, 2):
        flip_bit(folder)
    newest, damaged = newest_valid(tmp_path)
    assert newest is None
    assert [line.split(":")[0][-8:] for line in damaged] == ["00000002", "00000001"]


def test_a_step_reached_again_replaces_its_damaged_checkpoint(tmp_path: Path) -> None:
    _, second = write(tmp_path, 1, 2)
    flip_bit(second)
    write(tmp_path, 2)
    assert newest_valid(tmp_path) == (second, [])


@pytest.mark.parametrize(
    ("error", "raised", "message"),
    [
        (OSError(errno.ENOSPC, "disk full"), UserError, "of step 2 .* disk full; earlier checkpoints are intact"),
        (ValueError("learner failed"), ValueError, "learner failed"),
    ],
)
def test_a_failed_write_leaves_older_checkpoints_and_no_trace(
    tmp_path: Path, error: Exception, raised: type[Exception], message: str
) -> None:
    (first,) = write(tmp_path, 1)
    before = snapshot(first)

    def fail(folder: Path) -> None:
        save_parts(folder)
        raise error

    with pytest.raises(raised, match=message):
        write_checkpoint(tmp_path, 2, fail, {})
    assert newest_valid(tmp_path) == (first, []) and snapshot(first) == before
    assert [p.name for p in first.parent.iterdir()] == [first.name]


KILLED = """
import sys, time
from pathlib import Path
from minite.driver.checkpoint import write_checkpoint
def slow(folder):
    (folder / "part").write_bytes(b"x" * 1000)
    print("writing", flush=True)
    time.sleep(60)
write_checkpoint(Path(sys.argv[1]), 2, slow, {})
"""


def test_a_killed_write_is_invisible_and_cleaned_by_the_next(tmp_path: Path) -> None:
    (first,) = write(tmp_path, 1)
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "writing\n"
        process.send_signal(signal.SIGKILL)
    assert len(list(first.parent.iterdir())) == 2  # the leftover is there
    assert newest_valid(tmp_path) == (first, [])
    (second,) = write(tmp_path, 2)
    assert newest_valid(tmp_path) == (second, [])
    assert sorted(first.parent.iterdir()) == [first, second]


def test_prune_keeps_the_newest(tmp_path: Path) -> None:
    folders = write(tmp_path, 1, 20, 3, 100)
    prune(tmp_path, 9)
    assert list_checkpoints(tmp_path) == sorted(folders)
    prune(tmp_path, 2)
    assert [step_of(f) for f in list_checkpoints(tmp_path)] == [20, 100]
    assert newest_valid(tmp_path) == (folders[3], [])
    with pytest.raises(ValueError, match="at least 1"):
        prune(tmp_path, 0)
