"""Learner checkpoints that somebody else wrote: nothing in them runs, and every fault is one line."""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
from pathlib import Path

import pytest
import torch

from minite.errors import UserError
from tests.learner.tiny_policy import batch, learner, recipe

CONFIG = recipe("qwen3", "w4a4")


@pytest.fixture(scope="module")
def worker():
    with learner(CONFIG) as made:
        made.train_step(batch([9, 6]), 10)
        yield made


@pytest.fixture(scope="module")
def sound(worker, tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound") / "checkpoint"
    worker.save(folder)
    return folder


@pytest.fixture
def copy(sound, tmp_path):
    return Path(shutil.copytree(sound, tmp_path / "checkpoint"))


class Bomb:
    """Unpickled, it makes a folder in the working directory."""

    def __reduce__(self):
        return os.mkdir, ("exploded",)


def in_the_list(folder: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Bomb()))


def beside_the_list(folder: Path) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    metadata.planner_data = Bomb()
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_a_part(folder: Path) -> None:
    """The generator's state lies behind the other parts of its file, and the list says so."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    (index,) = (i for i in metadata.storage_data if i.fqn.startswith("rng/"))
    place, blob = metadata.storage_data[index], io.BytesIO()
    torch.save([Bomb()], blob)
    with (folder / place.relative_path).open("ab") as file:
        place.offset, place.length = file.tell(), len(blob.getvalue())
        file.write(blob.getvalue())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def in_the_common_part(folder: Path) -> None:
    torch.save({"layout": (1, 1, 1), "plan_digest": Bomb()}, folder / "common.pt")


@pytest.mark.parametrize("hide", [in_the_list, beside_the_list, in_a_part, in_the_common_part])
def test_no_pickle_in_it_is_run(worker, copy, hide, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    hide(copy)
    with pytest.raises(UserError, match=r"checkpoint: cannot be read \(") as told:
        worker.load(copy)
    assert not (tmp_path / "exploded").exists()
    assert "\n" not in str(told.value) and len(str(told.value)) < 1000


def test_a_sound_one_is_read_after_all_this(worker, sound):
    worker.load(sound)
    assert worker.step == 1


@pytest.mark.parametrize("name", [".metadata", "common.pt", "metadata.json", "__0_0.distcp"])
@pytest.mark.parametrize("spoil", ["removed", "cut", "emptied", "noise"])
def test_any_file_may_be_spoilt(worker, copy, name, spoil):
    path = copy / name
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "noise": random.Random(0).randbytes(len(data))}.get(spoil, b""))
    if spoil == "removed":
        path.unlink()
    with pytest.raises(UserError, match="checkpoint: cannot be read") as told:
        worker.load(copy)
    assert "\n" not in str(told.value) and len(str(told.value)) < 1000


def test_a_checkpoint_of_another_kind_says_what_is_missing(worker, copy):
    torch.save({"step": 3}, copy / "common.pt")
    with pytest.raises(UserError, match=r"written by None ranks"):
        worker.load(copy)
