"""sync.convert interrupted: killed anywhere and started again, it ends with the bytes of an uninterrupted run."""

import json
import os
import random
import signal

import pytest
from disk_model import contents, run, source
from small_model import recipe

from minite.errors import UserError
from minite.sync.convert import partial as partial_module
from minite.sync.convert import run as run_module
from minite.sync.convert.partial import JOURNAL, Partial
from minite.sync.tensor_file import TensorFileWriter

FILE_BYTES = 6_000  # some ten files
OPTIONS = {"file_bytes": FILE_BYTES}


@pytest.fixture
def config():
    return recipe("w4a4", alignment="off", kv_cache="fp8")


@pytest.fixture
def whole(tmp_path, config):
    """What an uninterrupted run writes."""
    run(source(tmp_path / "bf16", config), tmp_path / "whole", config, **OPTIONS)
    return contents(tmp_path / "whole")


def killed(tmp_path, config, owner, method: str, after: int) -> bool:
    """Convert in a child process that ends by SIGKILL after that many calls of a method; False: it ended well."""
    child = os.fork()
    if child == 0:
        calls, original = 0, getattr(owner, method)

        def counted(*arguments, **options):
            nonlocal calls
            calls += 1
            if calls > after:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        setattr(owner, method, counted)
        try:
            run(tmp_path / "bf16", tmp_path / "out", config, **OPTIONS)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("seed", range(4))
def test_killed_again_and_again_at_random(tmp_path, config, whole, seed):
    pick, kills = random.Random(seed), 0
    while killed(tmp_path, config, TensorFileWriter, "write", pick.randrange(15, 60)):
        kills += 1
        assert not (tmp_path / "out").exists()
    assert kills > 1 and contents(tmp_path / "out") == whole
    assert not (tmp_path / "out.partial").exists()


STEPS = [
    (Partial, "record", 0),
    (Partial, "record", 3),
    (Partial, "_append", 0),
    (Partial, "_append", 2),
    (TensorFileWriter, "close", 1),
    (run_module.Conversion, "finish", 0),
    (run_module, "write_json", 0),
    (run_module, "write_json", 2),
    (run_module, "save_tensors", 0),
    (run_module.shutil, "copyfile", 0),
    (Partial, "publish", 0),
    (partial_module.Path, "unlink", 0),
]


@pytest.mark.parametrize(("owner", "method", "after"), STEPS, ids=[f"{m}-{n}" for _, m, n in STEPS])
def test_killed_at_every_step(tmp_path, config, whole, owner, method, after):
    assert killed(tmp_path, config, owner, method, after)
    run(tmp_path / "bf16", tmp_path / "out", config, **OPTIONS)
    assert contents(tmp_path / "out") == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "out", "whole"]


def interrupted(tmp_path, config, after: int = 18) -> None:
    """Ctrl-C in the middle."""
    calls = 0

    def progress(done: int, total: int) -> None:
        nonlocal calls
        calls += 1
        if calls == after:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "bf16", tmp_path / "out", config, progress=progress, **OPTIONS)


def test_finished_files_are_not_written_again_and_progress_counts_them(tmp_path, config, whole):
    interrupted(tmp_path, config)
    journal = (tmp_path / "out.partial" / JOURNAL).read_text().splitlines()
    finished = [json.loads(line)["file"] for line in journal[1:]]
    before = {name: (tmp_path / "out.partial" / name).stat().st_mtime_ns for name in finished}
    seen: list[tuple[int, int]] = []
    run(tmp_path / "bf16", tmp_path / "out", config, progress=lambda *at: seen.append(at), **OPTIONS)
    assert len(finished) > 2 and contents(tmp_path / "out") == whole
    assert {name: (tmp_path / "out" / name).stat().st_mtime_ns for name in finished} == before
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1]


def test_a_line_that_was_being_written_is_forgotten(tmp_path, config, whole):
    interrupted(tmp_path, config)
    journal = tmp_path / "out.partial" / JOURNAL
    journal.write_bytes(journal.read_bytes()[:-7])
    run(tmp_path / "bf16", tmp_path / "out", config, **OPTIONS)
    assert contents(tmp_path / "out") == whole


def other_source(path, config) -> None:
    """One bit of the last tensor of a file, which is a small one."""
    file = path / "bf16" / "model-00001-of-00002.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


@pytest.mark.parametrize(
    ("change", "again", "text"),
    [
        (
            other_source,
            {},
            "another source, or the source has changed; start over with: rm -r .*out.partial",
        ),
        (lambda path, config: None, {"to": "fp8"}, "begun with another --to"),
        (lambda path, config: None, {"config": recipe("w4a16", alignment="off", kv_cache="fp8")}, "another recipe"),
        (lambda path, config: None, {"file_bytes": 20_000}, "begun with another file size"),
        (lambda path, config: first_file(path).unlink(), {}, "not as it was finished"),
        (lambda path, config: first_file(path).write_bytes(b"x"), {}, "not as it was finished"),
        (lambda path, config: record(path, 2, file="minite_journal.jsonl"), {}, "not as it was finished"),
        (lambda path, config: record(path, 2, file="../bf16/config.json"), {}, "not as it was finished"),
        (lambda path, config: swap(path), {}, "not as it was finished"),
        (lambda path, config: (path / "out.partial" / JOURNAL).write_text("{\n"), {}, "damaged"),
        (lambda path, config: (path / "out.partial" / JOURNAL).write_text("[]\n3\n"), {}, "damaged"),
        (lambda path, config: (path / "out.partial" / JOURNAL).unlink(), {}, "in the way and no conversion"),
    ],
)
def test_what_cannot_be_continued_is_named_and_left_alone(tmp_path, config, change, again, text):
    source(tmp_path / "bf16", config)
    interrupted(tmp_path, config)
    change(tmp_path, config)
    left = {name for name in contents(tmp_path / "out.partial") if name != JOURNAL}
    with pytest.raises(UserError, match=text):
        options = {"config": config, **OPTIONS, **again}
        run(tmp_path / "bf16", tmp_path / "out", **options)
    assert {name for name in contents(tmp_path / "out.partial") if name != JOURNAL} == left
    assert not (tmp_path / "out").exists()


def record(path, line: int, **changed) -> None:
    """Other values in a line of the journal, with the size that fits them."""
    journal = path / "out.partial" / JOURNAL
    lines = journal.read_text().splitlines()
    size = (path / "out.partial" / changed["file"]).stat().st_size
    lines[line] = json.dumps({**json.loads(lines[line]), "size": size, **changed})
    if changed["file"] == JOURNAL:
        lines[line] = json.dumps({**json.loads(lines[line]), "size": len("\n".join(lines)) + 1})
    journal.write_text("\n".join(lines) + "\n")


def swap(path) -> None:
    """Two finished files, the one in the place of the other."""
    journal = path / "out.partial" / JOURNAL
    lines = journal.read_text().splitlines()
    lines[1], lines[2] = lines[2], lines[1]
    journal.write_text("\n".join(lines) + "\n")


def first_file(path):
    return sorted((path / "out.partial").glob("*.safetensors"))[0]


def test_only_the_same_conversion_takes_a_finished_one_for_its_own(tmp_path, config, whole):
    """Killed between the rename and the removal of the journal: the same command is done, another finds DST taken."""
    assert killed(tmp_path, config, partial_module.Path, "unlink", 0)
    with pytest.raises(UserError, match="out: exists already"):
        run(tmp_path / "bf16", tmp_path / "out", config, "fp8", **OPTIONS)
    assert (tmp_path / "out" / JOURNAL).exists()
    run(tmp_path / "bf16", tmp_path / "out", config, **OPTIONS)
    assert contents(tmp_path / "out") == whole


def test_two_at_once_are_refused(tmp_path, config):
    source(tmp_path / "bf16", config)

    def progress(done: int, total: int) -> None:
        with pytest.raises(UserError, match="another process is converting into it"):
            run(tmp_path / "bf16", tmp_path / "out", config, **OPTIONS)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "bf16", tmp_path / "out", config, progress=progress, **OPTIONS)


def test_a_full_disk_leaves_what_is_finished(tmp_path, config, whole, monkeypatch):
    original, calls = TensorFileWriter.write, 0

    def full(self, name, tensor) -> None:
        nonlocal calls
        calls += 1
        if calls == 60:
            raise OSError(28, "No space left on device")
        original(self, name, tensor)

    monkeypatch.setattr(TensorFileWriter, "write", full)
    with pytest.raises(UserError, match="No space left on device.*then the same command goes on"):
        run(tmp_path / "bf16", tmp_path / "out", config, **OPTIONS)
    run(tmp_path / "bf16", tmp_path / "out", config, **OPTIONS)
    assert contents(tmp_path / "out") == whole
