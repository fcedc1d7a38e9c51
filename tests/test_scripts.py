"""scripts/environment.sh with a stand-in interpreter: when it installs, when it does not, and what it refuses."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Stands for Python: `-m venv` copies itself into the environment, `-m pip install` is noted and fails on demand.
STAND_IN = """#!/usr/bin/env bash
case "$*" in
    *"-m venv"*) env="${@: -1}"; mkdir -p "$env/bin"; touch "$env/pyvenv.cfg"; cp "$0" "$env/bin/python" ;;
    *"pip install"*) echo "$@" >>"$LOG"; [ ! -e "$LOG.fail" ] ;;
    *"pip --version"*|"-c"*) ;;
    *) echo "ran: $*" ;;
esac
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The set-up files alone, in a repository of their own."""
    root = tmp_path / "a checkout"  # a path with a blank in it
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("setup.py", "constraints.txt"):
        shutil.copy(ROOT / name, root / name)
    interpreter = tmp_path / "my python"
    interpreter.write_text(STAND_IN)
    interpreter.chmod(interpreter.stat().st_mode | stat.S_IXUSR)
    return root


def start(checkout: Path, script: str, *arguments: str, **variables: str) -> subprocess.Popen[str]:
    folder = checkout.parent
    inherited = {name: value for name, value in os.environ.items() if name != "MINITE_ENV"}  # set while CI runs
    env = {**inherited, "MINITE_PYTHON": str(folder / "my python"), "LOG": str(folder / "log"), **variables}
    command = [str(checkout / "scripts" / script), *arguments]
    return subprocess.Popen(
        command,
        env=env,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=60)
    return process.returncode, out, err


def installs(checkout: Path) -> int:
    log = checkout.parent / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def test_first_call_installs_and_later_calls_do_not(checkout: Path) -> None:
    code, out, err = finish(start(checkout, "train", "recipe.yaml", "--steps", "3"))
    assert (code, out) == (0, "ran: -m minite.cli train recipe.yaml --steps 3\n")
    assert err.startswith("minite: preparing ") and err.count("\n") == 1
    assert f"-c {checkout}/constraints.txt -e {checkout}[dev]" in (checkout.parent / "log").read_text()
    code, out, err = finish(start(checkout, "test", "tests/formats", "-k", "a b"))
    assert (code, out, err) == (0, "ran: -m pytest -n 2 --dist loadfile tests/formats -k a b\n", "")
    assert installs(checkout) == 1


def test_the_pretrained_model_is_one_command(checkout: Path) -> None:
    code, out, _ = finish(start(checkout, "smollm2", "some where"))
    assert (code, out) == (0, f"ran: {checkout}/scripts/smollm2.py some where\n") and installs(checkout) == 1


@pytest.mark.parametrize("name", ["setup.py", "constraints.txt"])
def test_changed_requirements_are_installed_again(checkout: Path, name: str) -> None:
    finish(start(checkout, "train"))
    with (checkout / name).open("a") as file:
        file.write("# changed\n")
    finish(start(checkout, "train"))
    assert installs(checkout) == 2


def test_a_failed_install_says_so_and_the_next_call_goes_on(checkout: Path) -> None:
    failing = checkout.parent / "log.fail"
    failing.touch()
    code, out, err = finish(start(checkout, "train"))
    assert (code, out) == (2, "") and "minite: error: installing into " in err and "again to continue" in err
    failing.unlink()
    assert finish(start(checkout, "train"))[0] == 0
    assert installs(checkout) == 2


def test_two_at_once_install_once(checkout: Path) -> None:
    processes = [start(checkout, "train"), start(checkout, "test")]
    assert [finish(process)[0] for process in processes] == [0, 0]
    assert installs(checkout) == 1


def test_environment_elsewhere(checkout: Path) -> None:
    assert finish(start(checkout, "train", MINITE_ENV="other/env"))[0] == 0
    assert (checkout.parent / "other" / "env" / "bin" / "python").exists()
    assert not (checkout / ".venv").exists()


def test_a_folder_that_is_no_environment_is_left_alone(checkout: Path) -> None:
    precious = checkout.parent / "precious"
    precious.mkdir()
    (precious / "thesis.tex").write_text("x")
    code, _, err = finish(start(checkout, "train", MINITE_ENV=str(precious)))
    assert code == 2 and "is not a virtual environment" in err
    assert [p.name for p in precious.iterdir()] == ["thesis.tex"]


def test_no_fitting_python_is_said(checkout: Path) -> None:
    code, _, err = finish(start(checkout, "train", MINITE_PYTHON="no-such-python"))
    assert code == 2 and "minite: error: no Python 3.11 or 3.12 among: no-such-python" in err
