"""Where the time of a step goes: a recipe and its BF16 twin, phase by phase, in one invocation.

Both are whole runs, actors and all, that take steps in turns, first one then the other and then the other way round,
so that what else the machine does hits both alike. They start from random weights: rewards are 0, the work is the same.
"""

from __future__ import annotations

import dataclasses
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from minite.config import RunConfig, resolve_plan
from minite.config.schema import PrecisionConfig
from minite.driver.actors import LearnerGroup
from minite.driver.cluster import cluster
from minite.driver.loop import Job, Run
from minite.driver.samplers import SamplerPool

PHASES = ("rollout", "logprob", "train", "sync", "step")
_NEVER = 1 << 30  # steps


class _Last:
    """Keeps the numbers of the newest step."""

    metrics: Mapping[str, float]

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self.metrics = metrics


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Median seconds by phase of PHASES."""

    name: str
    turns: int
    recipe: dict[str, float]
    bf16: dict[str, float]


def measure_steps(config: RunConfig, turns: int) -> StepTimes:
    """Time ``turns`` steps each of a recipe and of the same recipe in BF16, after one that warms up. [s]

    Raises UserError for a recipe that cannot run here.
    """
    torch.set_num_threads(1)  # of this process, as in the actors: the loss weights are computed here
    config = _bare(config)
    twin = dataclasses.replace(config, precision=PrecisionConfig(alignment=config.precision.alignment))
    with tempfile.TemporaryDirectory() as folder, cluster(twin, resolve_plan(twin)):
        runs = [_start(each, Path(folder)) for each in (config, twin)]
        times: list[dict[str, list[float]]] = [{phase: [] for phase in PHASES} for _ in runs]
        for turn in range(turns + 1):
            for i in (0, 1) if turn % 2 else (1, 0):
                run, last = runs[i]
                run.train_step()
                if turn:
                    for phase in PHASES:
                        times[i][phase].append(last.metrics[f"time/{phase}"])
    recipe, bf16 = ({phase: statistics.median(t[phase]) for phase in PHASES} for t in times)
    return StepTimes(config.name, turns, recipe, bf16)


def step_table(times: StepTimes) -> str:
    """The times as text. [ms]"""
    lines = [
        f"one step of {times.name} against the same in BF16, median of {times.turns} in turns",
        "phase      recipe [ms]   BF16 [ms]   recipe/BF16",
    ]
    for phase in PHASES:
        ours, bf16 = times.recipe[phase], times.bf16[phase]
        lines.append(f"{phase:10} {1e3 * ours:11.1f} {1e3 * bf16:11.1f} {ours / bf16:13.2f}")
    return "\n".join(lines)


def _bare(config: RunConfig) -> RunConfig:
    """The recipe without warm start, held-out checks and checkpoints. Two runs are up at once, and take turns."""
    return dataclasses.replace(
        config,
        warm_start=dataclasses.replace(config.warm_start, steps=0),
        data=dataclasses.replace(config.data, heldout=0),
        driver=dataclasses.replace(
            config.driver,
            steps=_NEVER,
            eval_every=_NEVER,
            checkpoint_every=_NEVER,
            num_cpus=2 * (config.learner.world_size + config.sampler.count),
        ),
    )


def _start(config: RunConfig, run_dir: Path) -> tuple[Run, _Last]:
    job, last = Job(config, resolve_plan(config), run_dir), _Last()
    learners = LearnerGroup(config, job.slot)
    run = Run(job, learners, SamplerPool(config, job.slot, job.recovery, learners.export), last)
    run.begin()
    return run, last
