"""The look of the report: style sheet, pointer script and the frame around the parts. Nothing here knows a metric."""

from __future__ import annotations

import json
from html import escape

from minite.diagnostics.svg import WIDTH, Drawing

# Colour by name: light page, dark page. The eight hues stay apart for colour-blind readers in this order; step1-4 are
# one hue from faint to strong, for what is ordered.
COLORS = {
    "blue": ("#2a78d6", "#3987e5"),
    "orange": ("#eb6834", "#d95926"),
    "aqua": ("#1baf7a", "#199e70"),
    "yellow": ("#eda100", "#c98500"),
    "magenta": ("#e87ba4", "#d55181"),
    "green": ("#008300", "#008300"),
    "violet": ("#4a3aa7", "#9085e9"),
    "red": ("#e34948", "#e66767"),
    "muted": ("#898781", "#898781"),
    "step1": ("#86b6ef", "#184f95"),
    "step2": ("#5598e7", "#256abf"),
    "step3": ("#256abf", "#5598e7"),
    "step4": ("#0d366b", "#9ec5f4"),
}

_STYLE = """
:root { color-scheme: light dark; --page:#f9f9f7; --card:#fcfcfb; --ink:#0b0b0b; --ink2:#52514e; --faint:#898781;
  --grid:#e8e7e1; --axis:#c3c2b7; --edge:rgba(11,11,11,.10); --warn:#fab219; --bad:#d03b3b; LIGHT }
@media (prefers-color-scheme: dark) { :root { --page:#0d0d0d; --card:#1a1a19; --ink:#fff; --ink2:#c3c2b7;
  --faint:#898781; --grid:#2c2c2a; --axis:#4a4a47; --edge:rgba(255,255,255,.10); DARK } }
* { box-sizing:border-box }
body { margin:0 auto; max-width:1320px; padding:28px 24px 60px; background:var(--page); color:var(--ink);
  font:14px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif }
h1 { font-size:24px; margin:0; font-weight:650; overflow-wrap:anywhere }
h2 { font-size:16px; margin:34px 0 12px; font-weight:650 }
.sub { color:var(--ink2); margin:2px 0 20px }
.note { border-left:3px solid var(--warn); background:var(--card); padding:6px 12px; margin:0 0 6px; color:var(--ink2) }
.top { display:grid; grid-template-columns:minmax(0,1fr) minmax(0,1.6fr); gap:16px; margin-top:16px }
.grid { display:grid; grid-template-columns:repeat(auto-fill,minmax(min(100%,480px),1fr)); gap:16px }
.card, figure { background:var(--card); border:1px solid var(--edge); border-radius:8px; padding:14px 16px; margin:0;
  position:relative; min-width:0 }
figure { display:flex; flex-direction:column; justify-content:space-between }
figcaption b { font-weight:600; font-size:14.5px } figcaption .unit { color:var(--faint); font-weight:400 }
figcaption p { margin:0 0 4px; color:var(--ink2); font-size:12.5px }
.legend { display:flex; flex-wrap:wrap; gap:2px 14px; font-size:12.5px; color:var(--ink2); margin:2px 0 4px }
.legend span::before, .tip i { content:""; display:inline-block; width:10px; height:10px; border-radius:2px;
  background:var(--c); margin-right:6px; vertical-align:-1px }
svg { display:block; width:100%; height:auto; outline-offset:2px }
line.grid { stroke:var(--grid) } line.zero { stroke:var(--axis) } line.cross { stroke:var(--faint) }
.tick { font-size:11px; fill:var(--faint); font-variant-numeric:tabular-nums }
.line { fill:none; stroke-width:1.8; stroke-linejoin:round }
.faint { stroke-width:1; opacity:.3 } .area { stroke:var(--card); stroke-width:1 }
.dot, .cursor circle { stroke:var(--card); stroke-width:1 } .broken { stroke:var(--bad); stroke-width:1.5 }
.tip { position:absolute; pointer-events:none; background:var(--card); border:1px solid var(--axis); border-radius:6px;
  padding:6px 10px; font-size:12.5px; white-space:nowrap; z-index:2; box-shadow:0 2px 8px rgba(0,0,0,.18) }
.tip b { font-weight:600; display:block } .tip em { font-style:normal; float:right; margin-left:18px;
  font-variant-numeric:tabular-nums; font-weight:600 }
table { border-collapse:collapse; width:100%; font-variant-numeric:tabular-nums }
th { text-align:right; font-weight:500; color:var(--faint); font-size:12.5px; padding:2px 8px 6px }
td { text-align:right; padding:4px 8px; border-top:1px solid var(--grid) } td.last { font-weight:600 }
th:first-child, td:first-child { text-align:left; padding-left:0 } td small { color:var(--faint) }
dl { display:grid; grid-template-columns:auto minmax(0,1fr); gap:5px 16px; margin:0 } dt { color:var(--faint) }
dd { margin:0; overflow-wrap:anywhere } .scroll { overflow-x:auto }
details { margin-top:34px } summary { cursor:pointer; margin-bottom:8px }
@media (max-width:860px) { .top { grid-template-columns:minmax(0,1fr) } body { padding:18px 14px } }
"""

_SCRIPT = """
for (const figure of document.querySelectorAll("figure")) {
  const data = JSON.parse(figure.querySelector("script").textContent), last = data.x.length - 1;
  const svg = figure.querySelector("svg"), cross = svg.querySelector(".cross"), cursor = svg.querySelector(".cursor");
  const tip = figure.querySelector(".tip");
  let at = last;
  function add(parent, tag, text) {
    const element = document.createElement(tag);
    element.textContent = text;
    parent.append(element);
    return element;
  }
  function hide() { tip.hidden = true; cursor.replaceChildren(); cross.setAttribute("visibility", "hidden"); }
  function show(i) {
    at = Math.max(0, Math.min(last, i));
    const x = data.x[at];
    cross.setAttribute("x1", x); cross.setAttribute("x2", x); cross.setAttribute("visibility", "visible");
    cursor.replaceChildren(); tip.replaceChildren(); tip.hidden = false;
    add(tip, "b", data.axis + " " + data.step[at]);
    for (const c of data.curves) {
      if (c.text[at] === null) continue;
      const row = add(tip, "div", "");
      add(row, "i", "").style.setProperty("--c", "var(--" + c.color + ")");
      row.append(c.label); add(row, "em", c.text[at]);
      if (c.y[at] === null) continue;
      const dot = document.createElementNS("http://www.w3.org/2000/svg", "circle");
      dot.setAttribute("class", "fill-" + c.color); dot.setAttribute("r", 4);
      dot.setAttribute("cx", x); dot.setAttribute("cy", c.y[at]); cursor.append(dot);
    }
    const box = svg.getBoundingClientRect(), frame = figure.getBoundingClientRect();
    const middle = box.left - frame.left + x * box.width / WIDTH;
    const fits = middle + 14 + tip.offsetWidth < frame.width;
    tip.style.left = (fits ? middle + 14 : Math.max(4, middle - 14 - tip.offsetWidth)) + "px";
    tip.style.top = (box.top - frame.top + 6) + "px";
  }
  svg.addEventListener("pointermove", (event) => {
    const box = svg.getBoundingClientRect(), x = (event.clientX - box.left) * WIDTH / box.width;
    let low = 0, high = last;
    while (low < high) { const mid = (low + high) >> 1; if (data.x[mid] < x) low = mid + 1; else high = mid; }
    show(low > 0 && x - data.x[low - 1] < data.x[low] - x ? low - 1 : low);
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("keydown", (event) => {
    const move = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (move) { show(at + move); event.preventDefault(); }
  });
}
"""


def page(title: str, body: str) -> str:
    """The whole document: style and script inside, nothing loaded from anywhere."""
    light, dark = (" ".join(f"--{name}:{pair[i]};" for name, pair in COLORS.items()) for i in (0, 1))
    classes = "".join(f".fill-{n} {{ fill:var(--{n}) }} .stroke-{n} {{ stroke:var(--{n}) }}\n" for n in COLORS)
    style = _STYLE.replace("LIGHT", light).replace("DARK", dark) + classes
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{style}</style></head>\n"
        f"<body>\n{body}\n<script>{_SCRIPT.replace('WIDTH', str(WIDTH))}</script></body></html>\n"
    )


def figure(
    title: str, unit: str, help_text: str, drawing: Drawing, legend: list[tuple[str, str]], axis: str = "step"
) -> str:
    """A chart with its caption; legend = (label, colour) pairs, shown where there is more than one.

    axis: what the horizontal axis counts, in the singular.
    """
    keys = "".join(f'<span style="--c:var(--{color})">{escape(label)}</span>' for label, color in legend)
    # "</" inside a script element would end it.
    data = json.dumps({"axis": axis, **drawing.hover}, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<figure><figcaption><b>{escape(title)}</b> <span class="unit">[{escape(unit)}] by {escape(axis)}</span>'
        f"<p>{escape(help_text)}</p>{f'<div class=legend>{keys}</div>' if len(legend) > 1 else ''}</figcaption>"
        f'{drawing.svg}<div class="tip" hidden></div><script type="application/json">{data}</script></figure>'
    )


def table(head: list[str], rows: list[list[str]]) -> str:
    """A table of texts; the last column stands out."""
    top = "".join(f"<th>{escape(cell)}</th>" for cell in head)
    lines = [
        "".join(f"<td{' class=last' if i == len(row) - 1 else ''}>{escape(c)}</td>" for i, c in enumerate(row))
        for row in rows
    ]
    return f'<div class="scroll"><table><tr>{top}</tr>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'


def facts(pairs: list[tuple[str, str]]) -> str:
    """Names and what they are."""
    return "<dl>" + "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in pairs) + "</dl>"
