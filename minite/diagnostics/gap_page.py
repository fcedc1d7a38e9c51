"""What one `minite gap` found, as a self-contained HTML page."""

from __future__ import annotations

from html import escape
from pathlib import Path

from minite.diagnostics import page
from minite.diagnostics.breakdown import Breakdown
from minite.diagnostics.causes import HEAD as CAUSES_HEAD
from minite.diagnostics.causes import causes_rows
from minite.diagnostics.gap_findings import Findings
from minite.diagnostics.gap_text import HEAD, PARTS, headline, rows, shown
from minite.diagnostics.layerwise import HEAD as LAYERS_HEAD
from minite.diagnostics.layerwise import layer_rows, verdict
from minite.diagnostics.svg import Line, line_chart
from minite.errors import UserError


def write_page(path: Path, found: Findings) -> Path:
    """Write the page and return its path. UserError where it cannot be written."""
    try:
        path.write_text(render(found), encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html: {path} cannot be written: {error}") from None
    return path


def render(found: Findings) -> str:
    """The page as text."""
    title = f"{found.name}: learner against sampler"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="sub">Log-prob gap, learner - sampler [nats]; alignment {escape(found.alignment)}, '
        f"plan {found.plan_digest[:16]}</p>",
        f'<div class="card">{page.facts(headline(found.gap))}</div>',
    ]
    if found.layers is not None:
        table = page.table(LAYERS_HEAD, layer_rows(found.layers))
        parts += ["<h2>Layers</h2>", *(f'<p class="note">{escape(line)}</p>' for line in verdict(found.layers)), table]
    if found.causes is not None:
        parts += ["<h2>Causes</h2>", page.table(CAUSES_HEAD, causes_rows(found.causes))]
    parts += ["<h2>Where the gap is</h2>", f'<div class="grid">{_charts(found.gap)}</div>']
    for part, name in PARTS.items():
        parts += [f"<h2>By {escape(name)}</h2>", page.table([part, *HEAD], rows(shown(found.gap, part)))]
    return page.page(title, "\n".join(parts))


def _charts(gap: Breakdown) -> str:
    """The largest and the lowest gap beside the mean, over the positions of a response."""
    bins = gap.parts["position"]
    if not bins:
        return ""
    lines = [
        Line("mean |gap|", "blue", [b.abs_mean for b in bins]),
        Line("max |gap|", "orange", [b.abs_max for b in bins]),
        Line("lowest gap", "red", [b.lowest for b in bins]),
    ]
    title, axis = "Gap along the response", "position"
    drawing = line_chart(title, [int(b.start) for b in bins], lines)
    text = "A gap that grows along the response points to what is carried along: the KV cache."
    return page.figure(title, "nats", text, drawing, [(line.label, line.color) for line in lines], axis)
