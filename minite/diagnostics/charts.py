"""Which curves the report shows: one row here is one chart. Keys are those of docs/metrics.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Curve:
    """One line of a chart."""

    key: str  # metric key
    label: str
    color: str  # a colour name of page.py


@dataclass(frozen=True)
class Chart:
    """One chart: curves of one unit."""

    section: str
    title: str
    unit: str
    help: str  # one sentence on how to read it
    curves: tuple[Curve, ...]
    stacked: bool = False


LEARNING, GAP, CORRECTION, TIME = "Learning", "Log-prob gap (learner - sampler)", "Correction", "Time"

# A time/<phase> key that is not a phase of its own but the sum of them.
TIME_TOTAL = "time/step"
# From the bottom of the stack up; phases of other names follow in the colours left.
PHASES = {"rollout": "blue", "logprob": "orange", "train": "aqua", "sync": "yellow", "eval": "magenta"}
OTHER_COLORS = ("green", "violet", "red")

CHARTS: tuple[Chart, ...] = (
    Chart(LEARNING, "Reward", "points", "Mean over the responses.", (Curve("reward/mean", "mean", "blue"),)),
    Chart(LEARNING, "Held-out accuracy", "fraction", "Prompts never trained on; measured every few steps.",
          (Curve("accuracy/heldout", "held-out", "blue"),)),
    Chart(LEARNING, "Policy entropy", "nats", "A fall to zero or a sudden rise is the first sign of a run going wrong.",
          (Curve("entropy/mean", "mean", "blue"),)),
    Chart(LEARNING, "Response length", "tokens", "Mean over the responses.",
          (Curve("response/length_mean", "mean", "blue"),)),
    Chart(LEARNING, "Clip fraction", "fraction", "Kept tokens whose update the policy-ratio clip took away.",
          (Curve("loss/clip_frac", "clip", "blue"), Curve("loss/dual_clip_frac", "dual clip", "orange"))),
    Chart(LEARNING, "Gradient norm", "norm", "Before clipping.", (Curve("learner/grad_norm", "norm", "blue"),)),
    Chart(GAP, "Mean absolute gap", "nats", "How far the two engines disagree on a token, on average.",
          (Curve("gap/abs_mean", "mean |gap|", "blue"),)),
    Chart(GAP, "Gap tails", "nats", "The negative tail (p1) sinking away from zero is what comes before a collapse.",
          (Curve("gap/p99", "p99", "blue"), Curve("gap/p1", "p1, negative tail", "red"))),
    Chart(GAP, "Importance-ratio ESS", "fraction", "Effective sample size of exp(gap): 1 = no mismatch.",
          (Curve("ratio/ess", "ESS", "blue"),)),
    Chart(GAP, "Gap against advantage", "correlation", "Off zero: the error lines up with the update.",
          (Curve("gap/corr_advantage", "corr(gap, A)", "blue"),)),
    Chart(CORRECTION, "TRIAGE regions", "fraction of tokens", "The rest of the loss tokens is clear.",
          (Curve("triage/narrowing_frac", "narrowing", "aqua"), Curve("triage/widening_frac", "widening", "yellow"),
           Curve("triage/tail_frac", "tail", "red"), Curve("triage/broken_frac", "broken", "violet"))),
    Chart(CORRECTION, "TRIAGE gradient share", "fraction of |A| x weight", "What each region still does to the policy.",
          (Curve("triage/narrowing_grad_share", "narrowing", "aqua"),
           Curve("triage/widening_grad_share", "widening", "yellow"))),
    Chart(CORRECTION, "Tail by position", "fraction of tokens", "Tail share by quarter of the response, q1 the first.",
          (Curve("triage/tail_frac_q1", "q1", "step1"), Curve("triage/tail_frac_q2", "q2", "step2"),
           Curve("triage/tail_frac_q3", "q3", "step3"), Curve("triage/tail_frac_q4", "q4", "step4"))),
    Chart(CORRECTION, "Dropped tokens", "fraction of tokens", "Weight 0, for whatever reason; broken: gap not finite.",
          (Curve("correction/dropped_frac", "dropped", "blue"), Curve("correction/broken_frac", "broken", "violet"))),
)  # fmt: skip

# Rows of the table at the top: key, label, unit.
SUMMARY: tuple[tuple[str, str, str], ...] = (
    ("reward/mean", "Reward", "points"),
    ("accuracy/heldout", "Held-out accuracy", "fraction"),
    ("entropy/mean", "Policy entropy", "nats"),
    ("response/length_mean", "Response length", "tokens"),
    ("gap/abs_mean", "Mean absolute gap", "nats"),
    ("gap/abs_max", "Largest absolute gap", "nats"),
    ("gap/p99", "Gap p99", "nats"),
    ("gap/p1", "Gap p1 (negative tail)", "nats"),
    ("ratio/ess", "Importance-ratio ESS", "fraction"),
    ("triage/tail_frac", "TRIAGE tail", "fraction"),
    ("correction/dropped_frac", "Dropped tokens", "fraction"),
    ("loss/clip_frac", "Clip fraction", "fraction"),
    (TIME_TOTAL, "Time of a step", "s"),
    ("time/sync", "Weight sync", "s"),
)


def time_chart(keys: list[str]) -> Chart | None:
    """Seconds per phase, stacked, of whatever time/<phase> keys a run has. None without any."""
    found = [key.removeprefix("time/") for key in keys if key.startswith("time/") and key != TIME_TOTAL]
    others = sorted(set(found) - set(PHASES))
    colors = PHASES | {phase: (*OTHER_COLORS, *["muted"] * len(others))[i] for i, phase in enumerate(others)}
    curves = tuple(Curve(f"time/{phase}", phase, color) for phase, color in colors.items() if phase in found)
    return (
        Chart(TIME, "Time by phase", "s", "Wall time of a step, the phases stacked.", curves, stacked=True)
        if found
        else None
    )
