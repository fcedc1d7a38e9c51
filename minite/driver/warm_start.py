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

from minite import __version__
from minite.config import RunConfig, config_to_dict, env, resolve_plan
from minite.config.schema import PrecisionConfig
from minite.driver import rundir
from minite.driver.actors import LearnerGroup, Slot
from minite.driver.buffer import supervised_batch
from minite.driver.data import Example, load_task
from minite.driver.tokenizer import Tokenizer

REPORTS = 5  # lines that tell of the progress


def prepare(config: RunConfig, run_dir: Path, tokenizer: Tokenizer, slot: Slot, note: Callable[[str], None]) -> None:
    """Put the weights to start from into ``run_dir/start``; nothing when the recipe asks for no warm start."""
    if config.warm_start.steps == 0:
        return
    cached = env.cache_dir() / "warm_start" / _key(config)
    if config.warm_start.cache and cached.is_dir():
        note("warm start: taken from the cache")
    else:
        with tempfile.TemporaryDirectory(dir=run_dir) as aside:
            made = Path(aside) / "weights"
            _train(_in_bf16(config), tokenizer, slot, made, note)
            if not config.warm_start.cache:
                made.rename(run_dir / rundir.START)
                return
            _publish(made, cached)
    with tempfile.TemporaryDirectory(dir=run_dir) as aside:
        copy = Path(shutil.copytree(cached, Path(aside) / "weights"))
        copy.rename(run_dir / rundir.START)  # whole or absent


def _train(config: RunConfig, tokenizer: Tokenizer, slot: Slot, out: Path, note: Callable[[str], None]) -> None:
    """Supervised steps on the train split, in an order that the seed decides."""
    settings = config.warm_start
    plan = resolve_plan(config)
    examples = load_task(config, tokenizer).train
    order = random.Random(config.seed)
    learners = LearnerGroup(config, plan, slot)
    try:
        for step in range(settings.steps):
            chosen = [_demonstration(order, examples, settings.wrong_frac) for _ in range(settings.batch_size)]
            metrics = learners.sft_step(supervised_batch(chosen, tokenizer, plan.digest))
            if (step + 1) % max(settings.steps // REPORTS, 1) == 0:
                note(f"warm start: step {step + 1} of {settings.steps}, loss {metrics['loss/sft']:.3f} nats per token")
        learners.save_hf(out)
    finally:
        learners.close()


def _demonstration(order: random.Random, examples: Sequence[Example], wrong_frac: float) -> Example:
    """A random question with its answer, or, in ``wrong_frac`` of the draws, with a wrong one."""
    example = order.choice(examples)
    wrong = order.random() < wrong_frac
    return dataclasses.replace(example, answer=example.wrong) if wrong and example.wrong is not None else example


def _in_bf16(config: RunConfig) -> RunConfig:
    return dataclasses.replace(config, precision=PrecisionConfig())


def _key(config: RunConfig) -> str:
    """Everything that decides the weights, hashed."""
    whole = config_to_dict(config)
    parts = {name: whole[name] for name in ("seed", "model", "data", "warm_start", "learner")}
    text = json.dumps([__version__, parts], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:24]


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
