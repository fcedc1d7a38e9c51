"""Every mistake a user can make: one line, exit code 2, nothing left behind. Each is a command of its own. Then a run
seen from outside in the middle of a step: its ports, what became of secrets in its environment, its end by Ctrl-C."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.driver.tiny_run import RECIPE, files, left_running, recipe, start

pytestmark = [pytest.mark.timeout(600), pytest.mark.slow]

SECRET = "hush-4a7c"
SECRETS = ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")
JSONL = ["-o", "data.kind=jsonl", "-o", "data.path=questions.jsonl"]
# name: arguments after `train`, a file to write first, what the line says.
MISTAKES = {
    "wrong recipe path": (["tinny.yaml"], {}, "tinny.yaml: no such recipe.*nearest is 'tiny.yaml'"),
    "unreadable YAML": (["broken.yaml"], {"broken.yaml": "model: {kind: [\n"}, "broken.yaml:2:1: not readable as YAML"),
    "wrong data path": (["tiny.yaml", *JSONL], {"question.jsonl": ""}, "data.path: questions.jsonl does not exist;"
                        ".*nearest is 'question.jsonl'"),
    "empty data file": (["tiny.yaml", *JSONL], {"questions.jsonl": "\n"}, "questions.jsonl is empty; expected lines"),
    "batch not divisible": (["tiny.yaml", "-o", "algo.minibatches=3"], {}, "algo.minibatches is 3: a minibatch would "
                            "hold 5.3 responses, which group_size 4 does not divide; expected a divisor"),
    "heads not divisible": (["tiny.yaml", "-o", "learner.tensor_parallel=3"], {}, "learner.tensor_parallel is 3: does "
                            "not divide num_heads 2; 2 would"),
    "too few CPUs": (["tiny.yaml", "-o", "sampler.count=3", "-o", "driver.num_cpus=2"], {}, "placement: colocated with "
                     "1 learner.* and 3 sampler.* needs 3 CPUs, got 2: lower .*driver.num_cpus=3"),
    "directory in use": (["tiny.yaml", "--run-dir", "taken"], {"taken/file": ""}, "taken is not empty: go on with "
                         "'minite resume taken' or give another --run-dir"),
}  # fmt: skip


def run(folder, *arguments):
    """(exit code, stdout, stderr) of `minite train` in ``folder``, after which nothing of it runs."""
    process = start(folder, "minite.cli", "train", *arguments)
    out, err = process.communicate(timeout=500)
    assert left_running(folder) == []
    return process.returncode, out, err


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_one_line_and_leaves_nothing(name, tmp_path):
    arguments, written, message = MISTAKES[name]
    folder = tmp_path / "work"
    recipe(folder)
    for path, text in written.items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(text)
    before = files(folder)
    code, out, err = run(folder, *arguments)
    assert (code, out) == (2, "")
    assert re.fullmatch(f"minite: error: .*{message}.*\n", err), err
    assert files(folder) == before


def test_a_mistake_that_only_the_learner_can_see(tmp_path):
    """Ray is up and the run directory made by then: both go again."""
    folder = tmp_path / "work"
    recipe(folder)
    (folder / "weights").mkdir()
    code, out, err = run(folder, "tiny.yaml", "--run-dir", "run", "-o", "model.checkpoint=weights")
    first, second, *refused = out.splitlines()
    assert code == 2 and first.startswith("run directory run;") and second.startswith("plan ")
    assert all(line.startswith("  not ") for line in refused)  # backends that auto did not take, and why
    assert re.fullmatch(r"minite: error: model.checkpoint: weights has no \*.safetensors file; .*\n", err)
    assert files(folder) == ["tiny.yaml", "weights"]


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A run in the middle of step 1, with secrets in its environment."""
    folder = tmp_path_factory.mktemp("running") / "work"
    recipe(folder, RECIPE.replace("steps: 5", "steps: 1000").replace("steps: 12", "steps: 1"))
    with pytest.MonkeyPatch.context() as patch:
        for name in SECRETS:
            patch.setenv(name, f"{SECRET}-{name}")
        patch.setenv("RAY_AUTH_MODE", "token")  # meant for another Ray of the user's
        process = start(folder, "minite.cli", "train", "tiny.yaml", "--run-dir", "run")
    metrics = folder / "run" / "metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.read_text()):
        time.sleep(0.1)  # until the line of step 0 is there: step 1 is under way
    yield process, folder
    process.kill()
    process.communicate()


def test_every_port_of_a_run_is_on_loopback(running):
    process, _ = running
    whole = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    listening = {}
    for each in whole:
        with suppress(psutil.Error):  # it has just ended
            title, taken = " ".join(each.cmdline()), each.net_connections("inet")
            listening[title] = {c.laddr.ip for c in taken if c.status == psutil.CONN_LISTEN}
    for kind in ("_Learner", "_Sampler", "raylet", "gcs_server"):
        assert any(kind in title and addresses for title, addresses in listening.items()), kind
    assert set().union(*listening.values()) <= {"127.0.0.1", "::ffff:127.0.0.1"}
    assert not any("dashboard/dashboard.py" in title and addresses for title, addresses in listening.items())


def test_no_secret_is_written_down(running):
    """Into the run directory, into files and logs of Ray, or into command lines, which every user of a machine sees."""
    process, folder = running
    whole = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    assert SECRET in str(whole[0].environ()), "the run has it"
    (ray_dir,) = {word.partition("=")[2] for p in whole for word in p.cmdline() if word.startswith("--temp-dir=")}
    written = [p for top in (folder, Path(ray_dir)) for p in top.rglob("*") if p.is_file()]
    assert any(p.name.startswith("raylet") for p in written) and any(p.name == "config.json" for p in written)
    assert [p for p in written if SECRET.encode() in p.read_bytes()] == []
    assert [p for p in whole if SECRET in " ".join(p.cmdline())] == []


def test_ctrl_c_ends_a_run_that_can_go_on(running):
    """The signal reaches every process of the terminal's group, and most of all the driver, in the middle of a step."""
    process, folder = running
    os.killpg(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, err) == (130, "minite: interrupted\n")
    assert "if it is stopped, go on with: minite resume run" in out and SECRET not in out
    assert left_running(folder) == []
    assert {"config.json", "plan.json", "metrics.jsonl"} <= set(files(folder / "run"))
