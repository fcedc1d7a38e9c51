"""metrics.jsonl through writes, kills and resumes; the view on and off a terminal; the key table."""

from __future__ import annotations

import io
import json
import math
from dataclasses import fields
from pathlib import Path

import pytest
from metric_keys import undocumented
from rich.console import Console

from minite.diagnostics.gap import gap_metrics
from minite.driver.metrics import METRICS_FILE, MetricsWriter, truncate_after
from minite.driver.progress import COLUMNS, ProgressView
from minite.errors import DiskError, UserError
from minite.types import GapSummary


def make_view(terminal: bool = False) -> tuple[ProgressView, io.StringIO]:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=terminal, width=140, color_system=None)
    return ProgressView("tiny", 100, console), screen


def record(run_dir: Path, *steps: int, after_step: int | None = None) -> None:
    with MetricsWriter(run_dir, make_view()[0], after_step=after_step) as writer:
        for step in steps:
            writer.write(step, {"reward/mean": step / 7, "time/step": 0.5})


def read(run_dir: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run_dir / METRICS_FILE).read_text().splitlines()]


def test_a_line_is_on_disk_when_write_returns_and_keeps_every_bit(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, make_view()[0]) as writer:
        writer.write(1, {"b": 0.1 + 0.2, "a": 1e-300})
        assert (tmp_path / METRICS_FILE).read_text() == '{"step": 1, "a": 1e-300, "b": 0.30000000000000004}\n'
        writer.write(2, {"nan": math.nan, "inf": -math.inf})
    assert read(tmp_path)[1] == {"step": 2, "inf": None, "nan": None}


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, a disk without room")
def test_a_full_disk_is_told_once_in_one_line(tmp_path: Path) -> None:
    (tmp_path / METRICS_FILE).symlink_to("/dev/full")
    with pytest.raises(DiskError, match="No space left"):
        record(tmp_path, 1)


def test_resume_takes_out_later_steps_and_the_torn_line(tmp_path: Path) -> None:
    record(tmp_path, *range(8))
    whole = (tmp_path / METRICS_FILE).read_bytes()
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"step": 8, "rew')
    record(tmp_path, 6, 7, after_step=5)
    assert (tmp_path / METRICS_FILE).read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == [METRICS_FILE]


def test_every_cut_of_the_file_leaves_whole_lines_in_order(tmp_path: Path) -> None:
    record(tmp_path, *range(4))
    path = tmp_path / METRICS_FILE
    whole = path.read_bytes()
    for cut in range(len(whole)):
        path.write_bytes(whole[:cut])
        truncate_after(path, 2)
        complete = whole[:cut].count(b"\n")
        assert [line["step"] for line in read(tmp_path)] == list(range(min(complete, 3)))


def test_a_line_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = tmp_path / METRICS_FILE
    for bad in ("oops", "[1]", '{"reward": 1}', ""):
        path.write_text(f'{{"step": 0}}\n{bad}\n{{"step": 2}}\n')
        before = path.read_bytes()
        with pytest.raises(UserError, match=rf"{METRICS_FILE}:2: .* is not the record of a step"):
            truncate_after(path, 1)
        assert path.read_bytes() == before


def test_what_was_repaired_in_lines_taken_out_is_kept(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, make_view()[0]) as writer:
        for step in range(4):
            writer.write(step, {"recovery/resyncs": 1.0, "recovery/seconds": 0.5, "reward/mean": 1.0})
    for expected in ({"recovery/resyncs": 2.0, "recovery/seconds": 1.0}, {}):
        with MetricsWriter(tmp_path, make_view()[0], after_step=1) as writer:
            assert writer.repairs == expected


def test_resume_without_a_file_starts_one(tmp_path: Path) -> None:
    record(tmp_path, 6, after_step=5)
    assert [line["step"] for line in read(tmp_path)] == [6]


def test_a_view_is_closed_by_whoever_opened_it_and_need_not_be(tmp_path: Path) -> None:
    view, _ = make_view(terminal=True)
    with MetricsWriter(tmp_path, view) as writer:
        writer.write(0, {})
    assert view._live is not None
    view.close()
    with MetricsWriter(tmp_path, None) as writer:
        writer.write(1, {})


def test_view_off_a_terminal_prints_one_line_a_step() -> None:
    view, screen = make_view()
    view.note("loading")
    view.update(0, {"accuracy/heldout": 0.25})
    view.update(1, {"reward/mean": 0.5, "gap/abs_mean": math.nan, "correction/dropped_frac": 0.001, "unknown": 1.0})
    view.close()
    lines = screen.getvalue().splitlines()
    assert len(lines) == 4
    assert lines[1].split() == ["step", *" ".join(header for header, _, _ in COLUMNS).split()]
    assert lines[2].split() == ["0/100", "0.250"]
    assert lines[3].split() == ["1/100", "0.500", "nan", "0.10%"]


def test_view_on_a_terminal_shows_a_table_and_what_is_left() -> None:
    view, screen = make_view(terminal=True)
    for step in range(20):
        view.update(step, {"reward/mean": step / 100})
    view.note("[not markup]")
    view.close()
    shown = screen.getvalue()
    assert "held-out" in shown and "0.190" in shown and "[not markup]" in shown
    assert "step 19 of 100" in shown and "left" in shown


def test_screen_and_gap_keys_are_documented() -> None:
    keys = [key for _, key, _ in COLUMNS] + list(gap_metrics(GapSummary(*[0 for _ in fields(GapSummary)])))
    assert undocumented(keys) == []
    assert undocumented(["triage/tail_frac", "time/sample", "gap/p99x9", "nope/mean"]) == ["gap/p99x9", "nope/mean"]
