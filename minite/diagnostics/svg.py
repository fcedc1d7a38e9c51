"""Charts as inline SVG text. Colours are CSS classes of page.py, so one drawing serves light and dark."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from minite.diagnostics.scales import number_text, round_ticks, value_range

WIDTH, HEIGHT = 600, 220
LEFT, RIGHT, TOP, BOTTOM = 60, 12, 10, 30
# A curve of so few points shows each as a dot: a line alone hides that accuracy was measured five times only.
DOTS_UP_TO = 40


@dataclass(frozen=True)
class Line:
    """One curve, or one layer of a stack."""

    label: str
    color: str
    values: Sequence[float | None]  # by drawn step; None = not recorded there, nan = recorded and not finite
    trend: Sequence[tuple[int, float]] = ()  # (step, mean around it): drawn strong, and the values faint behind it


@dataclass(frozen=True)
class Drawing:
    """The picture and what the pointer shows over it."""

    svg: str
    hover: dict[str, object]  # pixel x and step by point; by curve its label, colour, texts and pixel y


class _Axes:
    """Linear maps from steps and values to pixels."""

    def __init__(self, steps: Sequence[int], low: float, high: float) -> None:
        self.ticks = round_ticks(low, high)
        self.low, self.high = low, high
        self.first, self.last = steps[0], steps[-1]

    def x(self, step: float) -> float:
        if self.first == self.last:
            return (LEFT + WIDTH - RIGHT) / 2
        return LEFT + (step - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.high - value) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def svg(self) -> str:
        parts = []
        for tick in self.ticks:
            y = self.y(tick)
            kind = "zero" if tick == 0 else "grid"
            parts.append(f'<line class="{kind}" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{LEFT - 8}" y="{y + 3.5:.1f}" text-anchor="end">{number_text(tick)}</text>'
            )
        for step in self._step_ticks():
            anchor = "end" if self.x(step) > WIDTH - RIGHT - 12 else "middle"
            parts.append(
                f'<text class="tick" x="{self.x(step):.1f}" y="{HEIGHT - 12}" text-anchor="{anchor}">{step}</text>'
            )
        return "".join(parts)

    def _step_ticks(self) -> list[int]:
        if self.first == self.last:
            return [self.first]
        return [int(t) for t in round_ticks(self.first, self.last, 8) if t == int(t)]


def line_chart(title: str, steps: Sequence[int], lines: Sequence[Line]) -> Drawing:
    """Curves over steps. A value that is not finite breaks its curve and leaves a mark at the bottom."""
    axes = _Axes(steps, *value_range([v for line in lines for v in line.values if v is not None and math.isfinite(v)]))
    marks = "".join(_curve(axes, steps, line) for line in lines)
    ys = [[axes.y(v) if v is not None and math.isfinite(v) else None for v in line.values] for line in lines]
    return _drawing(title, axes, steps, lines, marks, ys)


def stacked_chart(title: str, steps: Sequence[int], lines: Sequence[Line]) -> Drawing:
    """Layers on top of each other, the first at the bottom. What is not recorded or not finite has no height."""
    heights = [[v if v is not None and math.isfinite(v) else 0.0 for v in line.values] for line in lines]
    tops = [[0.0] * len(steps)]
    for layer in heights:
        tops.append([below + h for below, h in zip(tops[-1], layer, strict=True)])
    axes = _Axes(steps, *value_range([0.0, *tops[-1]]))
    marks = ""
    for line, lower, upper in zip(lines, tops, tops[1:], strict=False):
        there = [(axes.x(s), axes.y(v)) for s, v in zip(steps, upper, strict=True)]
        back = [(axes.x(s), axes.y(v)) for s, v in zip(steps, lower, strict=True)][::-1]
        if len(steps) == 1:  # an area needs a width
            there, back = (
                [(x + side, y) for x, y in there for side in (-20, 20)],
                [(x + s, y) for x, y in back for s in (20, -20)],
            )
        marks += f'<path class="area fill-{line.color}" d="M{_path(there + back)}Z"/>'
    # The pointer names the layers as they lie, the top one first.
    return _drawing(title, axes, steps, lines[::-1], marks, [[axes.y(v) for v in top] for top in tops[:0:-1]])


def _curve(axes: _Axes, steps: Sequence[int], line: Line) -> str:
    runs: list[list[tuple[float, float]]] = [[]]
    broken = ""
    for step, value in zip(steps, line.values, strict=True):
        if value is None:
            continue
        if math.isfinite(value):
            runs[-1].append((axes.x(step), axes.y(value)))
        else:
            runs.append([])
            broken += (
                f'<path class="broken" d="M{axes.x(step):.1f} {HEIGHT - BOTTOM}v-7"><title>not finite</title></path>'
            )
    dots = sum(map(len, runs)) <= DOTS_UP_TO
    drawn = ""
    for run in runs:
        if len(run) > 1:
            faint = " faint" if line.trend else ""
            drawn += f'<path class="line{faint} stroke-{line.color}" d="M{_path(run)}"/>'
        if dots or len(run) == 1:
            drawn += "".join(
                f'<circle class="dot fill-{line.color}" cx="{x:.1f}" cy="{y:.1f}" r="2.5"/>' for x, y in run
            )
    if len(line.trend) > 1:
        trend = [(axes.x(step), axes.y(value)) for step, value in line.trend]
        drawn += f'<path class="line stroke-{line.color}" d="M{_path(trend)}"/>'
    return drawn + broken


def _path(points: Sequence[tuple[float, float]]) -> str:
    return "L".join(f"{x:.1f} {y:.1f}" for x, y in points)


def _drawing(
    title: str, axes: _Axes, steps: Sequence[int], lines: Sequence[Line], marks: str, ys: list[list[float | None]]
) -> Drawing:
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" aria-label="{escape(title)}">{axes.svg()}{marks}'
        f'<line class="cross" y1="{TOP}" y2="{HEIGHT - BOTTOM}" visibility="hidden"/><g class="cursor"></g></svg>'
    )
    curves = [
        {
            "label": line.label,
            "color": line.color,
            "text": [None if v is None else number_text(v) for v in line.values],
            "y": [None if y is None else round(y, 1) for y in y_of_line],
        }
        for line, y_of_line in zip(lines, ys, strict=True)
    ]
    return Drawing(svg, {"step": list(steps), "x": [round(axes.x(s), 1) for s in steps], "curves": curves})
