"""Short supervised start in BF16, so that GRPO begins with a policy that is sometimes right.

It does not depend on the precision plan: recipes that differ only in precision begin from the same weights. Its
result is cached by content, and copied into the run directory, which then needs nothing from outside.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

from minite import __version__
from minite.config import PrecisionPlan, RunConfig, config_to_dict, env, resolve_plan
from minite.config.schema import PrecisionConfig
from minite.driver import rundir
from minite.driver.buffer import supervised_batch
from minite.driver.data import Example
from minite.driver.tokenizer import Tokenizer
from minite.types import RolloutBatch

REPORTS = 5  # lines that tell of the progress
_ASIDE = ".aside-start"


class Learners(Protocol):
    """Those that train here: actors.LearnerGroup, or one in this process."""

    def setup(self, config: RunConfig, plan: PrecisionPlan) -> None: ...

    def sft_step(self, batch: RolloutBatch) -> dict[str, float]: ...

    def save_hf(self, path: Path) -> None: ...


def prepare(
    config: RunConfig,
    run_dir: Path,
    learners: Learners,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    note: Callable[[str], None],
) -> None:
    """Put the weights to start from into ``run_dir/start``, unless they are there or the recipe asks for no warm start.

    The directory appears whole. ``learners`` is used for the training and must be set up again afterwards.
    """
    start, aside = run_dir / rundir.START, run_dir / _ASIDE
    if config.warm_start.steps == 0 or start.exists():
        return
    shutil.rmtree(aside, ignore_errors=True)  # a killed process left it
    cached = env.cache_dir() / "warm_start" / _key(config, tokenizer, examples)
    if config.warm_start.cache and cached.is_dir():
        note("warm start: taken from the cache")
        shutil.copytree(cached, aside)
    else:
        _train(_in_bf16(config), learners, tokenizer, examples, aside, note)
        if config.warm_start.cache:
            _publish(aside, cached)
    aside.rename(start)


def _train(
    config: RunConfig,
    learners: Learners,
    tokenizer: Tokenizer,
    examples: Sequence[Example],
    out: Path,
    note: Callable[[str], None],
) -> None:
    """Supervised steps on the examples, in an order that the seed decides."""
    settings = config.warm_start
    plan = resolve_plan(config)
    order = random.Random(config.seed)
    learners.setup(config, plan)
    for step in range(settings.steps):
        chosen = [_demonstration(order, examples, settings.wrong_frac) for _ in range(settings.batch_size)]
        metrics = learners.sft_step(supervised_batch(chosen, tokenizer, plan.digest))
        if (step + 1) % max(settings.steps // REPORTS, 1) == 0:
            note(f"warm start: step {step + 1} of {settings.steps}, loss {metrics['loss/sft']:.3f} nats per token")
    learners.save_hf(out)


def _demonstration(order: random.Random, examples: Sequence[Example], wrong_frac: float) -> Example:
    """A random question with its answer, or, in ``wrong_frac`` of the draws, with a wrong one."""
    example = order.choice(examples)
    wrong = order.random() < wrong_frac
    return dataclasses.replace(example, answer=example.wrong) if wrong and example.wrong is not None else example


def _in_bf16(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, precision=PrecisionConfig())


def _key(config: RunConfig, tokenizer: Tokenizer, examples: Sequence[Example]) -> str:
    """Everything that decides the weights, hashed: settings, what the examples say, the weights before."""
    whole = config_to_dict(config)
    parts: dict[str, Any] = {name: whole[name] for name in ("seed", "model", "warm_start", "learner")}
    for unused in ("lr", "min_lr", "warmup_steps"):  # the warm start has a rate of its own
        del parts["learner"][unused]
    del parts["warm_start"]["cache"]
    digest = hashlib.sha256(json.dumps([__version__, parts, tokenizer.eos_id], sort_keys=True).encode())
    for example in examples:
        texts = (example.prompt, example.answer, example.wrong)
        digest.update(repr([text and tokenizer.encode(text) for text in texts]).encode())
    if config.model.checkpoint is not None:
        for file in sorted(Path(config.model.checkpoint).glob("*")):  # contents would take minutes to read
            digest.update(repr((file.name, file.stat().st_size, file.stat().st_mtime_ns)).encode())
    return digest.hexdigest()[:24]


def _publish(made: Path, cached: Path) -> None:
    """Copy into the cache under a name of its own, then rename: two runs may do this at once."""
    cached.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(dir=cached.parent, prefix=".aside-"))
    shutil.copytree(made, aside / "weights")
    try:
        (aside / "weights").rename(cached)
    except OSError:
        if not cached.is_dir():  # else another run was faster, with the same bytes
            raise
    finally:
        shutil.rmtree(aside, ignore_errors=True)
