"""The benchmark of gap, correction and monitor: it does them, at the size that is asked for."""

from __future__ import annotations

from minite.cli import main
from minite.driver import bench_watch
from tests.driver.tiny_run import config


def test_every_part_runs_on_every_token(tmp_path, monkeypatch):
    seen = []

    def summary(old_T, sampler_T, advantage_T, mask_T):
        seen.append((len(mask_T), int(mask_T.sum())))
        return original(old_T, sampler_T, advantage_T, mask_T)

    original = bench_watch.gap_summary
    monkeypatch.setattr(bench_watch, "gap_summary", summary)
    made = config(tmp_path)
    times = bench_watch.measure_watch(made, turns=2, tokens=24)
    responses = made.algo.prompts_per_step * made.algo.group_size
    assert seen == [(responses * (24 + bench_watch.PROMPT), responses * 24)] * 3
    assert list(times.seconds) == ["gap", "correction", "monitor"] and min(times.seconds.values()) > 0
    rows = bench_watch.watch_table(times).splitlines()
    assert rows[0].startswith(f"{responses} responses of 24 tokens, triage")
    assert [row.split()[0] for row in rows[1:]] == ["gap", "correction", "monitor", "together", "1"]


def test_command(capsys, tmp_path):
    assert main(["bench", "watch", "--turns", "1", "--json", str(tmp_path / "times.json")]) == 0
    assert "1024 responses of 4 tokens" in capsys.readouterr().out
    assert '"correction": ' in (tmp_path / "times.json").read_text()
