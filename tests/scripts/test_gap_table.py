"""The gap table on a model of seconds: rows whose values are known, and where a sampler's weights come from."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.driver.tiny_run import recipe


@pytest.fixture
def gap_table(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))
    return importlib.import_module("gap_table")


@pytest.mark.slow
def test_converted_files_change_nothing_and_scales_apart_do(gap_table, tmp_path, monkeypatch, capsys):
    given = ["-o", "warm_start.steps=0", "-o", "model.init_std=0.3"]
    rows = ["w4a4", "naive", "offline", "foreign"]
    monkeypatch.setattr(sys, "argv", ["gap_table.py", str(recipe(tmp_path)), "--rows", ",".join(rows), *given])
    gap_table.main()
    out, err = capsys.readouterr()
    gaps = {row: float(line.split("|")[3]) for row, line in zip(rows, out.splitlines()[2:], strict=True)}
    assert gaps["w4a4"] == gaps["offline"] == 0 and min(gaps["naive"], gaps["foreign"]) > 1e-3
    assert "converted files: the bytes that the learner sends" in err
    assert "apart: other bytes than those that the learner sends" in err


def test_a_row_that_is_not_there_is_told(gap_table, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gap_table.py", "recipe.yaml", "--rows", "w4a5"])
    with pytest.raises(SystemExit):
        gap_table.main()
    assert "--rows: got 'w4a5', expected some of bf16, naive" in capsys.readouterr().err
