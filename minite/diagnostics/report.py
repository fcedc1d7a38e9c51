"""One self-contained HTML page of a run: what it was, how it went, and the curves an RL engineer looks at."""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Sequence
from html import escape
from pathlib import Path

from minite.diagnostics import page
from minite.diagnostics.charts import CHARTS, SUMMARY, TIME_TOTAL, Chart, time_chart
from minite.diagnostics.runlog import RunLog, read_run
from minite.diagnostics.scales import BUCKETS, drawn_steps, number_text, split
from minite.diagnostics.svg import Line, line_chart, stacked_chart

TABLE_STEPS = 50  # rows of the table of numbers at the end


def write_report(run_dir: str | Path) -> Path:
    """Write RUN/report.html from metrics.jsonl, config.json and plan.json, and return its path.

    Replaced in one move, so a reader never sees half a page. Raises: UserError where there is nothing to report on.
    """
    run_dir = Path(run_dir)
    text = render(read_run(run_dir))
    path = run_dir / "report.html"
    draft = path.with_suffix(".html.part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
    return path


def render(run: RunLog) -> str:
    """The page as text."""
    planned = run.setting("driver.steps")
    of_planned = f" of {planned}" if planned is not None else ""
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in run.notes)
    charts = [chart for chart in (*CHARTS, time_chart(list(run.series))) if chart is not None]
    shown = [chart for chart in charts if _curves(run, chart)]
    missing = [chart.title for chart in charts if chart not in shown]
    parts = [
        f"<h1>{escape(run.name)}</h1>",
        f'<p class="sub">Step {run.steps[-1]}{of_planned}, recorded: {len(run.steps)}</p>',
        notes,
        f'<div class="top"><div class="card">{page.facts(_facts(run))}</div>'
        f'<div class="card">{_summary_table(run)}</div></div>',
    ]
    for section in dict.fromkeys(chart.section for chart in shown):
        figures = "".join(_figure(run, chart) for chart in shown if chart.section == section)
        parts.append(f'<h2>{escape(section)}</h2><div class="grid">{figures}</div>')
    if missing:
        parts.append(f'<p class="sub">Not recorded in this run: {escape(", ".join(missing))}.</p>')
    parts.append(_numbers(run))
    return page.page(f"{run.name} - miniTE run", "\n".join(parts))


def _curves(run: RunLog, chart: Chart) -> list[tuple[str, str, dict[int, float]]]:
    """(label, colour, values) of the curves of a chart that the run recorded."""
    return [(c.label, c.color, run.series[c.key]) for c in chart.curves if c.key in run.series]


def _figure(run: RunLog, chart: Chart) -> str:
    curves = _curves(run, chart)
    buckets = split(run.steps) if len(run.steps) > 4 * BUCKETS else []
    per_bucket = f"the mean of about {round(len(run.steps) / BUCKETS)} steps."
    if chart.stacked:
        # Layers of different extremes would not add up, so a stack is thinned by means.
        steps = [bucket[-1] for bucket in buckets] or run.steps
        groups = buckets or [[step] for step in steps]
        lines = [Line(label, color, [_mean(values, group) for group in groups]) for label, color, values in curves]
        note = f" Each point: {per_bucket}" if buckets else ""
        drawing = stacked_chart(chart.title, steps, lines)
    else:
        steps = drawn_steps(run.steps, [values for *_, values in curves])
        lines = [
            Line(label, color, [values.get(step) for step in steps], _trend(values, buckets))
            for label, color, values in curves
        ]
        note = f" Strong line: {per_bucket}" if any(line.trend for line in lines) else ""
        drawing = line_chart(chart.title, steps, lines)
    return page.figure(
        chart.title, chart.unit, chart.help + note, drawing, [(line.label, line.color) for line in lines]
    )


def _trend(values: dict[int, float], buckets: list[Sequence[int]]) -> list[tuple[int, float]]:
    """Means over buckets, for a curve with so many points that only these can be followed by eye."""
    if len(values) <= 4 * BUCKETS:
        return []
    means = [(bucket[len(bucket) // 2], _mean(values, bucket)) for bucket in buckets]
    return [(step, mean) for step, mean in means if mean is not None]


def _mean(values: dict[int, float], steps: Sequence[int]) -> float | None:
    known = [values[step] for step in steps if step in values and math.isfinite(values[step])]
    return math.fsum(known) / len(known) if known else None


def _facts(run: RunLog) -> list[tuple[str, str]]:
    """What was run, from config.json and plan.json; only what they say."""
    pairs = [
        (name, " / ".join(str(run.setting(path)) for path in paths.split()))
        for name, paths in (
            ("Model", "model.kind"),
            ("Layers / hidden / vocab", "model.num_layers model.hidden_size model.vocab_size"),
            ("Prompts / group / minibatches", "algo.prompts_per_step algo.group_size algo.minibatches"),
            ("Correction", "correction.kind"),
            ("Learning rate", "learner.lr"),
            ("Sampler", "sampler.kind"),
            ("Placement", "driver.placement"),
            ("Seed", "seed"),
        )
        if all(run.setting(path) is not None for path in paths.split())
    ]
    plan = run.plan or {}
    modules = [m for m in plan.get("modules", []) if isinstance(m, dict)]
    formats = Counter((m.get("format"), m.get("weight"), m.get("input")) for m in modules)
    for (name, weight, operand), count in formats.items():
        pairs.append((f"Format {name}", f"{count} linear{'s' * (count > 1)}: weight {weight}, input {operand}"))
    for name, key in (("Alignment", "alignment"), ("KV cache", "kv_cache"), ("Backend", "backend")):
        if key in plan:
            pairs.append((name, str(plan[key])))
    if "digest" in plan:
        pairs.append(("Plan digest", str(plan["digest"])[:16]))
    return pairs or [("Settings", "not recorded")]


def _summary_table(run: RunLog) -> str:
    rows = []
    for key, label, unit in SUMMARY:
        values = [v for v in run.series.get(key, {}).values() if math.isfinite(v)]
        if values:
            numbers = (values[0], min(values), max(values), values[-1])
            rows.append([f"{label} [{unit}]", *map(number_text, numbers)])
    return page.table(["Metric", "first", "lowest", "highest", "last"], rows)


def _numbers(run: RunLog) -> str:
    """The last steps as a table, for reading without the charts."""
    keys = [key for key, *_ in SUMMARY if key in run.series and key != TIME_TOTAL]
    rows = [
        [str(step), *(number_text(run.series[key][step]) if step in run.series[key] else "" for key in keys)]
        for step in run.steps[-TABLE_STEPS:]
    ]
    title = f"Numbers of the last {len(rows)} steps"
    return f"<details><summary>{title}</summary>{page.table(['step', *keys], rows)}</details>"
