"""Run directories that were damaged or made up, through `minite resume`: one line, exit code 2, nothing changed."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import pytest

from minite.cli import main
from minite.config import resolve_plan
from minite.driver import checkpoint, loop, rundir
from minite.driver.checkpoint import MANIFEST
from minite.driver.metrics import truncate_after
from minite.errors import UserError
from tests.driver.tiny_run import config

STATE = {"step": 3, "weight_digest": "0", "plan_digest": "0", "triage": {}, "watch": {}, "rollouts": {}}
DEEP = "[" * 100_000 + "]" * 100_000


class Started(Exception):
    """Everything was in order."""


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A run directory with checkpoints of steps 2 and 4 of 5."""
    folder = tmp_path_factory.mktemp("sound")
    run_config = config(folder)
    rundir.create(folder / "run", run_config, resolve_plan(run_config))
    for step in (2, 4):
        checkpoint.write_checkpoint(folder / "run", step, _parts, STATE | {"step": step})
    (folder / "run" / "metrics.jsonl").write_text("".join(f'{{"step": {i}}}\n' for i in range(5)))
    return folder / "run"


def _parts(folder: Path) -> None:
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 40)


@pytest.fixture
def run(sound, tmp_path, monkeypatch):
    """A copy of it, of which a resume goes no further than to the start of Ray."""

    def go(job, folder):
        raise Started(folder.name if folder else None)

    monkeypatch.setattr(loop, "_go", go)
    return Path(shutil.copytree(sound, tmp_path / "run"))


def resume(run: Path, capsys) -> str:
    """The line on stderr of a resume that must be refused."""
    before = {str(p): p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert main(["resume", str(run)]) == 2
    out, err = capsys.readouterr()
    assert err.startswith("minite: error: ") and err.count("\n") == 1 and len(err) < 1500
    assert before == {str(p): p.read_bytes() for p in run.rglob("*") if p.is_file()}
    return err


def edited(text: str, change) -> str:
    data = json.loads(text)
    change(data)
    return json.dumps(data)


SPOILT = {
    "empty": lambda text: "",
    "cut": lambda text: text[: len(text) // 2],
    "nested for the sake of it": lambda text: DEEP,
    "a number without end": lambda text: '{"seed": ' + "9" * 10_000 + "}",
    "a list": lambda text: "[1, 2]",
    "a word": lambda text: '"word"',
    "null": lambda text: "null",
    "an empty mapping": lambda text: "{}",
    "values of wrong types": lambda text: edited(text, lambda d: d.update(dict.fromkeys(d, [{"a": []}]))),
    "values that are null": lambda text: edited(text, lambda d: d.update(dict.fromkeys(d))),
    "an unknown key": lambda text: edited(text, lambda d: d.update(surprise=1)),
}


@pytest.mark.parametrize("name", ["config.json", "plan.json"])
@pytest.mark.parametrize("spoil", SPOILT)
def test_a_spoilt_settings_file_is_named(run, name, spoil, capsys):
    path = run / name
    path.write_text(SPOILT[spoil](path.read_text()))
    assert name in resume(run, capsys) or spoil == "an empty mapping"


def test_a_settings_file_that_is_no_text_is_named(run, capsys):
    for name in ("config.json", "plan.json"):
        whole = (run / name).read_bytes()
        (run / name).write_bytes(b"\xff\xfe" + whole)
        assert f"{name}: cannot be read" in resume(run, capsys)
        (run / name).write_bytes(whole)


def test_a_huge_setting_is_refused_soon(run, capsys):
    for change in ({"num_layers": 10**12}, {"vocab_size": 10**30}, {"hidden_size": -(10**30)}, {"num_experts": 10**9}):
        whole = (run / "config.json").read_text()
        (run / "config.json").write_text(edited(whole, lambda d, change=change: d["model"].update(change)))
        resume(run, capsys)
        (run / "config.json").write_text(whole)


def _manifest(change):
    return lambda folder: (folder / MANIFEST).write_text(edited((folder / MANIFEST).read_text(), change))


HOSTILE = {
    "nested for the sake of it": lambda folder: (folder / MANIFEST).write_text(DEEP),
    "no files": _manifest(lambda d: d.pop("files")),
    "files of a wrong type": _manifest(lambda d: d.update(files=[1])),
    "a file of a wrong type": _manifest(lambda d: d.update(files={"state.json": 1})),
    "a step of a wrong type": _manifest(lambda d: d.update(step="four")),
    "a file outside": _manifest(lambda d: d["files"].update({"../../config.json": {"bytes": 1, "sha256": "0"}})),
    "a file with a strange name": _manifest(lambda d: d["files"].update({"a\0b": {"bytes": 1, "sha256": "0"}})),
    "a device": lambda folder: [(folder / "weights.bin").unlink(), (folder / "weights.bin").symlink_to("/dev/zero")],
    "a folder in a file's place": lambda folder: [(folder / MANIFEST).unlink(), (folder / MANIFEST).mkdir()],
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_made_up_checkpoint_is_passed_by(run, name, capsys):
    newest = checkpoint.checkpoint_dir(run, 4)
    HOSTILE[name](newest)
    with pytest.raises(Started, match="step_00000002"):
        main(["resume", str(run)])
    out = capsys.readouterr().out
    assert out.startswith(f"damaged checkpoint {newest}: ") and out.count("\n") == 2 and len(out) < 1500


def test_what_only_looks_like_a_checkpoint_is_passed_by(run, capsys):
    (run / "checkpoints" / "step_9x").mkdir()
    (run / "checkpoints" / "step_00000009").write_text("a file")
    with pytest.raises(Started, match="step_00000004"):
        main(["resume", str(run)])
    assert "step_00000009: " in capsys.readouterr().out


def test_any_damage_to_any_file_is_a_line_or_harmless(run, capsys):
    """A changed byte, or an end that is missing, in 60 places; only what is not read by then may pass."""
    files, ended = sorted(p for p in run.rglob("*") if p.is_file()), []
    for seed in range(60):
        rng = random.Random(seed)
        path = rng.choice(files)
        whole = path.read_bytes()
        at = rng.randrange(len(whole))
        path.write_bytes(
            whole[:at] if seed % 2 else whole[:at] + bytes([whole[at] ^ (1 << rng.randrange(8))]) + whole[at + 1 :]
        )
        try:
            ended.append(main(["resume", str(run)]))
        except Started as started:
            ended.append(str(started))
        finally:
            path.write_bytes(whole)
        err = capsys.readouterr().err
        assert err.count("\n") == (1 if ended[-1] == 2 else 0) and len(err) < 1500
    assert set(ended) == {2, "step_00000002", "step_00000004"}


@pytest.mark.parametrize("key", STATE)
@pytest.mark.parametrize("value", [None, [], 1.5])
def test_a_state_that_fits_its_manifest_but_is_none_of_ours_is_told(tmp_path, key, value):
    folder = checkpoint.write_checkpoint(tmp_path, 3, _parts, STATE | {key: value})
    assert checkpoint.newest_valid(tmp_path) == (folder, [])
    with pytest.raises(UserError, match=f"step_00000003: state.json has no '{key}' of type"):
        checkpoint.read_run_state(folder)


@pytest.mark.parametrize("text", ["{", "[]", DEEP, '{"step": {"__tensor__": "state.no"}}'])
def test_a_state_that_is_no_state_is_told(tmp_path, text):
    folder = checkpoint.write_checkpoint(tmp_path, 3, _parts, STATE)
    assert checkpoint.read_run_state(folder) == STATE
    (folder / "state.json").write_text(text)
    with pytest.raises(UserError, match="step_00000003: state.json (cannot be read|has no 'step')"):
        checkpoint.read_run_state(folder)


@pytest.mark.parametrize(
    "line", [b"\xff\xfe", b'{"step": "one"}', b'{"step": null}', DEEP.encode(), b"{}", b"[]", b"7"]
)
def test_a_spoilt_line_of_metrics_is_named(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 0}\n' + line + b'\n{"step": 2}\n')
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"metrics.jsonl:2: .* is not the record of a step; repair or remove the line"):
        truncate_after(path, 2)
    assert path.read_bytes() == before
