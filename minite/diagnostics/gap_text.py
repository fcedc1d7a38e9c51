"""The log-prob gap of a batch as a table for the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from minite.diagnostics.breakdown import Bin, Breakdown

WORST = 8  # responses shown, the largest mean |gap| first
PARTS = {  # key of Breakdown.parts -> what its bins are
    "position": "position in the response [tokens]",
    "probability": "probability under the sampler",
    "entropy": "entropy of the learner [nats]",
    "response": "response",
}
HEAD = ["tokens", "mean |gap|", "mean", "lowest", "max |gap|"]


def headline(gap: Breakdown) -> list[tuple[str, str]]:
    """(name, value) of what describes the whole batch."""
    s = gap.summary
    quantiles = (("p0.1", s.p001), ("p1", s.p01), ("p50", s.p50), ("p99", s.p99), ("p99.9", s.p999))
    return [
        ("tokens", f"{s.tokens}, gap not finite: {s.nonfinite}"),
        ("mean |gap|", f"{s.abs_mean:.3e}"),
        ("p99 |gap|, max", f"{s.abs_p99:.3e}, {s.abs_max:.3e}"),
        ("mean gap", f"{s.mean:+.3e}"),
        ("quantiles", "  ".join(f"{name} {value:+.2e}" for name, value in quantiles)),
        ("negative tail", f"{gap.tail_mean:+.3e} (mean of the lowest hundredth)"),
        ("KL(sampler, learner)", f"k1 {gap.k1:+.3e}, k3 {gap.k3:.3e}"),
        ("ESS of exp(gap)", f"{s.ess:.6f}"),
    ]


def rows(bins: Sequence[Bin]) -> list[list[str]]:
    """A line of texts for each bin, its label first."""
    return [
        [b.label, str(b.tokens), f"{b.abs_mean:.2e}", f"{b.mean:+.2e}", f"{b.lowest:+.2e}", f"{b.abs_max:.2e}"]
        for b in bins
    ]


def shown(gap: Breakdown, part: str) -> tuple[Bin, ...]:
    """The bins of a part that a reader is shown: of responses only the worst."""
    bins = gap.parts[part]
    return tuple(sorted(bins, key=lambda b: -b.abs_mean)[:WORST]) if part == "response" else bins


def gap_table(gap: Breakdown) -> str:
    """The whole report as text. Gaps are learner minus sampler, in nats."""
    width = max(len(name) for name, _ in headline(gap))
    lines = [f"{name:{width}}  {value}" for name, value in headline(gap)]
    for part, title in PARTS.items():
        bins = shown(gap, part)
        left_out = len(gap.parts[part]) - len(bins)
        lines += ["", *columns([title, *HEAD], rows(bins))]
        if left_out:
            lines.append(f"... {left_out} more, smaller")
    return "\n".join(lines)


def columns(head: list[str], body: list[list[str]], texts: int = 1) -> list[str]:
    """Lines of a table, numbers to the right. ``texts``: 1 = the first column is text, 2 = the last one too."""
    cells = [head, *body]
    widths = [max(len(row[i]) for row in cells) for i in range(len(head))]
    left = {0, len(head) - 1} if texts == 2 else {0}
    return [
        "  ".join(f"{cell:{'<' if i in left else '>'}{widths[i]}}" for i, cell in enumerate(row)).rstrip()
        for row in cells
    ]
