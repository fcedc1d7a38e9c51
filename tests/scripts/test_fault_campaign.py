"""The bookkeeping of scripts/fault_campaign.py. Its runs are real ones and take minutes; see docs/results.md."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from minite.driver import checkpoint

SCRIPTS = Path(__file__).parents[2] / "scripts"
STEPS = 3


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The scripts import each other by their bare names, as they do when they are run."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    yield
    for name in [name for name in sys.modules if name.startswith("fault_")]:
        del sys.modules[name]


def result(number: int, done: bool, problems: list[str], **survived: float | None) -> dict[str, object]:
    faults = [
        {"fault": name.replace("_", " "), "step": 1, "survived": seconds is not None} | {"seconds": seconds}
        for name, seconds in survived.items()
    ]
    return {"run": number, "done": done, "faults": faults, "problems": problems, "seconds": 1.0}


def test_the_table_counts_by_fault() -> None:
    from fault_campaign import table

    rows = table(
        [
            result(0, True, [], sampler_killed=3.0, driver_killed=9.0),
            result(1, True, ["exit code 1"], sampler_killed=None),
            result(2, False, [], sampler_killed=5.0),
        ]
    ).splitlines()
    assert rows[1].split() == ["sampler", "killed", "3", "2", "4.0", "5.0"]
    assert rows[2].split() == ["driver", "killed", "1", "1", "9.0", "9.0"]
    assert rows[-1] == "1 of 2 finished runs ended well; 1 stopped before their end"


def test_a_second_call_does_what_is_left_and_a_stopped_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fault_campaign

    asked: list[int] = []

    def one(self: object, number: int, _: object) -> dict[str, object]:
        asked.append(number)
        return result(number, number != 1 or len(asked) > 3, [], sampler_killed=2.0)

    monkeypatch.setattr(fault_campaign.Campaign, "one", one)
    monkeypatch.setattr(fault_campaign.Campaign, "reference", lambda self: [])
    arguments = ["--out", str(tmp_path), "--runs", "3", "--steps", str(STEPS)]
    assert fault_campaign.main(arguments) == 0 and sorted(asked) == [0, 1, 2]
    assert "2 of 2 finished runs ended well; 1 stopped before their end" in capsys.readouterr().out
    assert fault_campaign.main(arguments) == 0 and asked[3:] == [1]
    assert "3 of 3 finished runs ended well; 0 stopped" in capsys.readouterr().out
    assert fault_campaign.main([*arguments, "--minutes", "0"]) == 0 and asked[4:] == []


@pytest.mark.parametrize("name", ["results.jsonl", "reference.json"])
def test_what_another_campaign_left_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fault_campaign

    def make(*arguments: str) -> int:
        return fault_campaign.main(["--out", str(tmp_path / "out"), "--runs", "1", "--steps", str(STEPS), *arguments])

    def reference(self: fault_campaign.Campaign) -> list[dict[str, object]]:
        self.kept.write_text(json.dumps({"campaign": self.identity, "lines": []}))
        return []

    monkeypatch.setattr(fault_campaign.Campaign, "one", lambda *_: result(0, True, [], sampler_killed=2.0))
    monkeypatch.setattr(fault_campaign.Campaign, "reference", reference)
    assert make() == 0
    for other in {"results.jsonl", "reference.json"} - {name}:
        (tmp_path / "out" / other).unlink()
    before = (tmp_path / "out" / name).read_bytes()
    others = [["--seed", "1"], ["--steps", "4"], ["--timeout", "5"], ["--device", "cuda"]]
    for changed in (*others, ["--faults", "sampler killed"]):
        with pytest.raises(SystemExit, match="2"):
            make(*changed)
        assert f"{name}: made with {changed[0][2:]} " in capsys.readouterr().err
    monkeypatch.setattr(fault_campaign, "_digest_of_code", lambda: "0")
    with pytest.raises(SystemExit, match="2"):
        make()
    assert "made with code" in capsys.readouterr().err
    assert (tmp_path / "out" / name).read_bytes() == before


def test_that_the_store_is_full_is_taken_from_ray(tmp_path: Path) -> None:
    from fault_kinds import _FULL, _line_of

    said = "(raylet) node_manager.cc:2475: Triggering object spilling because current usage {} is above threshold 80%."
    log = tmp_path / "raylet.out"
    lines = [said.format(usage) + "\n" for usage in ("100.001%", "93.7512%", "100%", "81.25%")]
    log.write_text("".join(lines))
    assert _line_of(log, _FULL, 0) == said.format("100%")
    assert _line_of(log, _FULL, len("".join(lines[:3]))) is None


def test_a_run_finds_the_packages_and_the_device_of_the_campaign(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import fault_campaign
    import fault_run

    started: list[tuple[list[str], dict[str, str]]] = []
    monkeypatch.setattr(fault_run.subprocess, "Popen", lambda command, env, **_: started.append((command, env)))
    monkeypatch.setattr(fault_campaign.Campaign, "go", lambda self: fault_run.Running(self.out, self.settings, 1, None))
    monkeypatch.setenv("PYTHONPATH", "/packages")
    assert fault_campaign.main(["--out", str(tmp_path / "out"), "--device", "cuda"]) == 0
    ((command, environment),) = started
    assert environment["PYTHONPATH"].split(":")[-1] == "/packages"
    assert {"learner.device=cuda", "sampler.device=cuda"} < set(command)


@pytest.fixture
def ended(tmp_path: Path) -> SimpleNamespace:
    """What a good run of three steps leaves. ``process`` would take it a step further."""
    buffer = {"last_id": 12, "issued": 13, "trained": 12, "dropped": 1}
    lines = [{"step": 0}] + [
        {"step": i, "gap/abs_max": 0.0, "policy_lag/max": 0.0, "rollout/groups": 4} for i in range(1, STEPS + 1)
    ]
    lines[2]["reward/failed_groups"] = 1

    def save(folder: Path) -> None:
        torch.save({"step": 2 * STEPS}, folder / "common.pt")

    checkpoint.write_checkpoint(tmp_path, STEPS, save, {"rollouts": {"buffer": buffer}})
    run = SimpleNamespace(run_dir=tmp_path, folder=tmp_path, now=lines)
    run.lines = lambda: run.now
    run.step = lambda: run.now[-1]["step"]
    run.go_on = lambda *_: setattr(run, "now", [*run.now, {"step": STEPS + 1}])
    run.wait_for_end = lambda: 0
    return run


def test_a_good_run_has_no_problems(ended: SimpleNamespace) -> None:
    from fault_run import problems

    assert problems(ended, STEPS, list(ended.now)) == []


def test_each_wrong_is_told(ended: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    import fault_run

    good = ended.now

    def told(line: int, **change: float) -> str:
        lines = [dict(each) for each in good]
        lines[line] |= {key.replace("__", "/"): value for key, value in change.items()}
        return " ".join(fault_run.problems(SimpleNamespace(**vars(ended) | {"lines": lambda: lines}), STEPS, None))

    assert "tokens of other weights" in told(1, gap__abs_max=1e-3)
    assert "tokens of other weights" in told(3, policy_lag__max=2.0)
    assert "lost or used twice" in told(1, rollout__groups=5)
    assert "holds 4 lines" in told(3, step=2)
    ended.now = good
    assert "line 3 differs" in fault_run.problems(ended, STEPS, [*good[:3], {"step": 3}])[0]
    ended.now = good
    monkeypatch.setattr(fault_run, "MINIBATCHES", 3)
    assert "6 optimizer steps, expected 9" in " ".join(fault_run.problems(ended, STEPS, None))
    newest = checkpoint.checkpoint_dir(ended.run_dir, STEPS) / "common.pt"
    newest.write_bytes(newest.read_bytes()[:-1])
    ended.now = good
    assert "the newest whole checkpoint is None" in fault_run.problems(ended, STEPS, None)[0]


def test_the_reward_function_obeys_an_order_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from fault_reward import score

    monkeypatch.chdir(tmp_path)
    assert score(" 7", "7") == 1.0 and score("8", "7") == 0.0
    Path("bad_reward").write_text("nan")
    assert math.isnan(score("7", "7")) and score("7", "7") == 1.0
    Path("bad_reward").write_text("raise")
    with pytest.raises(ZeroDivisionError):
        score("7", "7")


def test_progress_is_read_from_the_newest_whole_line(tmp_path: Path) -> None:
    from fault_run import Running

    run = Running.__new__(Running)
    run.folder, run.run_dir, run.furthest, run._stop = tmp_path, tmp_path, 0, threading.Event()
    assert run.step() == -1
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 0}) + "\n" + json.dumps({"step": 7}) + '\n{"step": 8')
    assert run.step() == 7 == run.furthest
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"step": 5}) + "\n")
    assert run.step() == 5 and run.furthest == 7
