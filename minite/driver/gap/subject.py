"""What `minite gap` examines: a recipe or a run, its prompts, and how its weights come into a learner."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from minite.config import PrecisionPlan, RunConfig, load_recipe, resolve_plan
from minite.driver import checkpoint, rundir, warm_start
from minite.driver.data import Example, Prompt, PromptStream, load_task
from minite.driver.gap.local import LocalLearner
from minite.driver.tokenizer import Tokenizer, make_tokenizer
from minite.driver.watch import plan_at
from minite.errors import UserError
from minite.learner.worker import LearnerWorker

Note = Callable[[str], None]
Load = Callable[[LearnerWorker], None]  # bring the weights in


@dataclass(frozen=True)
class Subject:
    """A recipe or a run."""

    config: RunConfig
    plan: PrecisionPlan
    prompts: tuple[Prompt, ...]
    stop_token: int
    load: Load


def open_subject(path: Path, overrides: Sequence[str], prompts: Path | None, note: Note) -> Subject:
    """A recipe file or a run directory, with -o overrides. ``prompts``: a file of prompts instead of the recipe's.

    Raises UserError for what the run itself would refuse, and for learners of several processes.
    """
    if path.is_dir():
        config, begun = rundir.load(path, overrides)
        folder = checkpoint.choose(path, note)
        plan = plan_at(config, begun, checkpoint.read_run_state(folder)) if folder else begun
    else:
        config = load_recipe(path, overrides)
        plan = resolve_plan(config)
    check_one_process(config)
    tokenizer = make_tokenizer(config)
    load = _weights_of_run(path, folder, note) if path.is_dir() else _weights_of_recipe(config, tokenizer, note)
    if prompts is None:
        examples = load_task(config, tokenizer).train
        asked = PromptStream(examples, tokenizer, config.seed).take(config.algo.prompts_per_step)
    else:
        asked = [_prompt(i, text, config, tokenizer) for i, text in enumerate(read_prompts(prompts))]
    return Subject(config, plan, tuple(asked), tokenizer.eos_id, load)


def check_one_process(config: RunConfig) -> None:
    """UserError where the recipe's learner needs several processes."""
    if config.learner.world_size > 1:
        raise UserError(
            f"minite gap runs one learner process, but the recipe's learner has {config.learner.world_size}; add "
            "-o learner.tensor_parallel=1 -o learner.data_parallel=1 -o learner.expert_parallel=1"
        )


def read_prompts(path: Path) -> list[str]:
    """The prompts of a file: the lines of a text, or the "prompt" of each line of a .jsonl. Blank lines are skipped."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--prompts: {path} cannot be read: {error}; expected UTF-8 text, one prompt a line") from None
    if not lines:
        raise UserError(f"--prompts: {path} holds no prompt; expected one a line")
    return [_of_json(line, f"--prompts: {path}") for line in lines] if path.suffix == ".jsonl" else lines


def _of_json(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(f'{where}: {line[:40]!r} is not JSON ({error}); expected {{"prompt": "..."}}') from None
    prompt = record.get("prompt") if isinstance(record, dict) else None
    if not isinstance(prompt, str) or not prompt:
        raise UserError(f'{where}: got {line[:40]!r}; expected {{"prompt": "..."}} with some text')
    return prompt


def _prompt(index: int, text: str, config: RunConfig, tokenizer: Tokenizer) -> Prompt:
    tokens = tuple(tokenizer.encode_prompt(text))
    room = config.model.max_seq_len - config.sampler.max_new_tokens
    if not 0 < len(tokens) <= room:
        raise UserError(f"--prompts: {text[:40]!r} has {len(tokens)} tokens; expected 1 to {room}")
    return Prompt(index, Example(text, "", text), tokens)


def _weights_of_run(run_dir: Path, folder: Path | None, note: Note) -> Load:
    """Those of the newest whole checkpoint ``folder``; before the first one, those that the run began with."""
    start = run_dir / rundir.START
    if folder is not None:
        note(f"weights: {folder}")
        return lambda worker: worker.load(folder)
    if start.is_dir():
        note(f"weights: {start}, the run has no checkpoint yet")
        return lambda worker: worker.load_hf(start)
    note("weights: as the recipe starts, the run has no checkpoint yet")
    return lambda worker: None


def _weights_of_recipe(config: RunConfig, tokenizer: Tokenizer, note: Note) -> Load:
    """Those that a run of the recipe would begin with: a checkpoint or random ones, then the warm start."""
    if config.warm_start.steps == 0:
        return lambda worker: None
    examples = load_task(config, tokenizer).train
    folder = tempfile.TemporaryDirectory(prefix="minite-gap-")
    learner = LocalLearner()
    try:
        warm_start.prepare(config, Path(folder.name), learner, tokenizer, examples, note)
    finally:
        learner.close()
    # The folder lives as long as the function that reads it.
    return lambda worker: worker.load_hf(Path(folder.name) / rundir.START)
