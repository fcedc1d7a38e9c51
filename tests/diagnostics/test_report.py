"""The report: what is on the page for good, broken, tiny and long runs, and that the page needs nothing else."""

from __future__ import annotations

import json
import random
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
from made_up_run import record, write_run

from minite.diagnostics.charts import CHARTS
from minite.diagnostics.report import write_report
from minite.diagnostics.runlog import read_run
from minite.errors import UserError


class _Page(HTMLParser):
    """Checks nesting while it collects tags, addresses, texts and the data of the charts."""

    VOID = frozenset({"meta", "br", "img"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[str] = []
        self.addresses: list[str] = []
        self.text = ""
        self.charts: dict[str, dict] = {}
        self.title = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.addresses += [value for key, value in attrs if key in ("src", "href", "xlink:href", "action")]
        if tag == "svg":
            self.title = dict(attrs)["aria-label"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] == "script" and data.startswith("{"):
            self.charts[self.title] = json.loads(data)
        elif not self.open or self.open[-1] not in ("script", "style"):
            self.text += data


def _page(run_dir: Path) -> _Page:
    return _Page(write_report(run_dir).read_text(encoding="utf-8"))


def _rewrite(run_dir: Path, change) -> None:
    path = run_dir / "metrics.jsonl"
    path.write_text(change(path.read_text()))


def test_a_whole_run(tmp_path):
    path = write_report(write_run(tmp_path, 60))
    assert path == tmp_path / "report.html" and [p.name for p in tmp_path.glob("*.part")] == []
    page = _Page(path.read_text(encoding="utf-8"))
    assert set(page.charts) == {chart.title for chart in CHARTS} | {"Time by phase"}
    for needed in ("tiny_qwen3_moe_w4a4_grpo", "Step 60 of 60", "[nats]", "nvfp4_row", "aligned", "p1, negative tail"):
        assert needed in page.text
    assert "Not recorded" not in page.text
    reward = page.charts["Reward"]
    metrics = read_run(tmp_path).series
    assert reward["step"] == list(range(1, 61))
    assert [float(t) for t in reward["curves"][0]["text"]] == pytest.approx(
        list(metrics["reward/mean"].values()), rel=1e-3
    )


def test_the_page_loads_nothing(tmp_path):
    text = write_report(write_run(tmp_path, 5)).read_text(encoding="utf-8")
    assert _Page(text).addresses == []
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|//cdn", text)
    assert set(re.findall(r"https?://[^\s\"'<]+", text)) == {"http://www.w3.org/2000/svg"}  # a name, never fetched


@pytest.mark.parametrize("steps", [1, 2, 481, 5000])
def test_any_length(tmp_path, steps):
    path = write_report(write_run(tmp_path, steps))
    page = _page(tmp_path)
    assert path.stat().st_size < 1_000_000
    for title, data in page.charts.items():
        assert data["step"] == sorted(set(data["step"])), title
        assert all(len(c["text"]) == len(c["y"]) == len(data["x"]) == len(data["step"]) for c in data["curves"]), title
    assert page.charts["Reward"]["step"][0] == 1 and page.charts["Reward"]["step"][-1] == steps


def test_a_spike_in_a_long_run_is_drawn(tmp_path):
    write_run(tmp_path, 2000)
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for step, value in ((1234, 77.0), (1777, float("nan"))):
        lines[step - 1] = json.dumps({**json.loads(lines[step - 1]), "gap/abs_mean": value})
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    drawn = _page(tmp_path).charts["Mean absolute gap"]
    texts = dict(zip(drawn["step"], drawn["curves"][0]["text"], strict=True))
    assert texts[1234] == "77" and texts[1777] == "not finite"


def test_time_of_a_long_run_adds_up(tmp_path):
    """Layers are thinned by means: their sum is the mean step time, and time/step is not a layer itself."""
    write_run(tmp_path, 2000)
    chart = _page(tmp_path).charts["Time by phase"]
    assert [c["label"] for c in chart["curves"]] == ["sync", "train", "logprob", "rollout"]  # as they lie, top first
    layers = [sum(float(c["text"][i]) for c in chart["curves"]) for i in range(len(chart["step"]))]
    total = read_run(tmp_path).series["time/step"]
    assert sum(layers) / len(layers) == pytest.approx(sum(total.values()) / 2000, rel=1e-3)
    tops = [c["y"] for c in chart["curves"]]
    assert all(a < b for upper, lower in zip(tops, tops[1:], strict=False) for a, b in zip(upper, lower, strict=True))


def test_sparse_accuracy_is_drawn_at_its_steps_only(tmp_path):
    assert _page(write_run(tmp_path, 60)).charts["Held-out accuracy"]["step"] == [10, 20, 30, 40, 50, 60]


def test_a_last_line_cut_off_by_a_crash(tmp_path):
    write_run(tmp_path, 10)
    _rewrite(tmp_path, lambda text: text[:-40])
    page = _page(tmp_path)
    assert page.charts["Reward"]["step"] == list(range(1, 10))
    assert "cut off" in page.text


def test_lines_that_are_no_record(tmp_path):
    write_run(tmp_path, 10)
    _rewrite(tmp_path, lambda text: 'garbage\n[1]\n{"reward/mean": 1}\n\n' + text)
    page = _page(tmp_path)
    assert "no record of a step: 3" in page.text and "cut off" not in page.text
    assert page.charts["Reward"]["step"] == list(range(1, 11))


def test_steps_done_again_after_a_resume_count_once_and_late(tmp_path):
    write_run(tmp_path, 10)
    _rewrite(tmp_path, lambda text: text + '{"step": 8, "reward/mean": 42.0}\n{"step": 9, "reward/mean": 43.0}\n')
    run = read_run(tmp_path)
    assert run.steps == list(range(1, 11))
    assert run.series["reward/mean"][8] == 42.0 and 9 not in run.series["gap/p1"]
    assert "after a resume: 2" in _page(tmp_path).text


def test_values_that_are_no_numbers(tmp_path):
    write_run(tmp_path, 12)
    bad = {2: "NaN", 3: "Infinity", 4: "-Infinity", 5: "null", 6: "1e999", 7: '"text"', 8: "true"}
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    for step, value in bad.items():
        lines[step - 1] = re.sub(r'"reward/mean": [^,]+', f'"reward/mean": {value}', lines[step - 1])
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    page = _page(tmp_path)
    chart = page.charts["Reward"]
    assert chart["step"] == [1, 2, 3, 4, 5, 6, 9, 10, 11, 12]  # texts and booleans are not this metric
    assert chart["curves"][0]["text"][1:6] == ["not finite"] * 5 and chart["curves"][0]["y"][1:6] == [None] * 5
    assert "not finite in 5 of 12 steps, first in step 2" in page.text


@pytest.mark.parametrize("value", [0.0, -3.5, 1e-9, 1e30, -1e-30, 5e-324, 1e308])
def test_curves_of_any_size(tmp_path, value):
    records = [{"step": s, "gap/abs_mean": value * (1 + s / 10), "gap/p99": value} for s in range(1, 4)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    for title in ("Mean absolute gap", "Gap tails"):
        ys = [y for y in _page(tmp_path).charts[title]["curves"][0]["y"] if y is not None]
        assert ys and all(0 <= y <= 220 for y in ys)


def test_missing_keys_and_files_are_named(tmp_path):
    write_run(tmp_path, 3, settings=False)
    lines = [{k: v for k, v in record(s, 3, random.Random(0)).items() if "triage" not in k} for s in (1, 2)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    page = _page(tmp_path)
    assert "no config.json" in page.text and "no plan.json" in page.text
    assert (
        "Not recorded in this run: Held-out accuracy, TRIAGE regions, TRIAGE gradient share, Tail by position."
        in page.text
    )
    assert tmp_path.name in page.text and page.charts["Reward"]


def test_a_run_with_a_step_and_nothing_else(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n')
    page = _page(tmp_path)
    assert page.charts == {} and "Step 0" in page.text


def test_damaged_settings_do_not_stop_the_report(tmp_path):
    write_run(tmp_path, 2)
    (tmp_path / "config.json").write_text("{")
    (tmp_path / "plan.json").write_text('{"modules": [3, {}], "alignment": null}')
    page = _page(tmp_path)
    assert "config.json is not readable JSON" in page.text and page.charts["Reward"]


def test_texts_cannot_break_out_of_the_page(tmp_path):
    write_run(tmp_path, 2)
    evil = '</script><script>alert("x")</script><img src=x>'
    (tmp_path / "config.json").write_text(json.dumps({"name": evil}))
    _rewrite(tmp_path, lambda text: text.replace("time/rollout", "time/" + evil.replace('"', "'")))
    page = _page(tmp_path)
    assert "img" not in page.tags and page.tags.count("script") == len(page.charts) + 1
    assert evil in page.text and page.charts["Time by phase"]["curves"][0]["label"] == evil.replace('"', "'")


def test_nothing_to_report_on(tmp_path):
    with pytest.raises(UserError, match="metrics.jsonl: no such file"):
        write_report(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "rew')
    with pytest.raises(UserError, match="holds no finished step yet"):
        write_report(tmp_path)
