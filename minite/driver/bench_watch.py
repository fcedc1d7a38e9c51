"""What watching a run costs: the gap's summary, the correction's weights and the drift test, on a made-up rollout of a
recipe's size. All of it runs on one core of the driver, between the learner's log-probs and its update.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable

import torch

from minite.config import RunConfig
from minite.config.schema import MonitorConfig
from minite.diagnostics.gap import gap_metrics, gap_summary
from minite.diagnostics.monitor import SIGNALS, Monitor
from minite.losses.correction import correct
from minite.losses.triage_state import TriageState

PROMPT, SPREAD = 64, 0.1  # prompt tokens of a response; standard deviation of the gaps [nats]


@dataclasses.dataclass(frozen=True)
class WatchTimes:
    """Median processor seconds of a step by part."""

    responses: int
    tokens: int  # of each, all sampled
    correction: str
    seconds: dict[str, float]


def measure_watch(config: RunConfig, turns: int, tokens: int | None = None) -> WatchTimes:
    """Time the parts ``turns`` times, after one that warms up. ``tokens``: of a response, in place of the recipe's."""
    torch.set_num_threads(1)  # as in the driver
    responses, length = config.algo.prompts_per_step * config.algo.group_size, tokens or config.sampler.max_new_tokens
    rng = torch.Generator().manual_seed(config.seed)
    mask_T = (torch.arange(PROMPT + length) >= PROMPT).repeat(responses)
    sequence_T = torch.arange(responses).repeat_interleave(PROMPT + length)
    sampler_T = -torch.rand(len(mask_T), generator=rng)
    old_T = sampler_T + SPREAD * torch.randn(len(mask_T), generator=rng)
    advantage_T = torch.randn(responses, generator=rng)[sequence_T]
    state, monitor = TriageState(), Monitor(MonitorConfig(watch=tuple(SIGNALS)))
    told = {"entropy/mean": 1.0, "router/flip_frac": 0.01}

    def gap() -> None:
        told.update(gap_metrics(gap_summary(old_T, sampler_T, advantage_T, mask_T)))

    def weights() -> None:
        correct(config.correction, old_T, sampler_T, advantage_T, mask_T, sequence_T, state)

    parts: dict[str, Callable[[], object]] = {
        "gap": gap, "correction": weights, "monitor": lambda: monitor.observe(0, told)
    }  # fmt: skip
    seconds = {name: statistics.median([_seconds(part) for _ in range(turns + 1)][1:]) for name, part in parts.items()}
    return WatchTimes(responses, length, config.correction.kind, seconds)


def _seconds(part: Callable[[], object]) -> float:
    start = time.thread_time()  # its own, whatever else the machine does
    part()
    return time.thread_time() - start


def watch_table(times: WatchTimes) -> str:
    """The times as text. [ms]"""
    total = sum(times.seconds.values())
    lines = [f"{times.responses} responses of {times.tokens} tokens, {times.correction}, every signal watched"]
    lines += [f"{name:10} {1e3 * spent:9.2f} ms" for name, spent in (*times.seconds.items(), ("together", total))]
    return "\n".join([*lines, f"1 % of a step of {100 * total:.1f} s"])
