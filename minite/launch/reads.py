"""Which settings of a recipe `minite launch` reads. Any other that is not at its default is refused, not dropped."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from minite.config import RunConfig
from minite.errors import UserError

# Sections of which all counts: slime's arguments, the plan, or the plugin's correction take it. Those of the second
# line are off: refuse.py refuses what switches them on, and minite train would not look at the rest either.
_SECTIONS = {"model", "precision", "correction", "slime"} | {"warm_start", "monitor"}

_READ = {
    "data": "kind path tokenizer chat_template reward max_operand operations tasks questions",  # the last four by kind
    "learner": "tensor_parallel expert_parallel data_parallel lr min_lr warmup_steps weight_decay beta1 beta2 "
    "clip_grad tokens_per_microbatch recompute",
    "sampler": "kind count max_batch temperature top_p top_k max_new_tokens transport",
    "algo": "prompts_per_step group_size minibatches normalize_std clip_low clip_high dual_clip kl_coef entropy_coef "
    "router_replay drop_flat_groups",
    "driver": "steps placement ahead checkpoint_every tensorboard prometheus_port wandb",
}

# What slime has in the place of a setting, where there is something to say.
_INSTEAD = {
    "data.heldout": "slime evaluates on slime.eval_data",
    "learner.device": "slime runs on GPUs",
    "sampler.device": "slime runs on GPUs",
    "sampler.kv_tokens": "slime.memory_fraction sizes the cache of SGLang's own method",
    "sampler.server": "slime starts its engines as HTTP servers anyway",
    "sampler.tensor_parallel": "slime.gpus_per_engine is that of slime's engines",
    "algo.max_resample": "slime samples until the batch is full",
    "driver.eval_every": "slime evaluates only with slime.eval_data",
    "driver.eval_temperature": "slime evaluates only with slime.eval_data",
}


def is_read(path: str, config: RunConfig) -> bool:
    """Whether `minite launch` does what the setting at ``path`` ("section.name") says."""
    if path == "sampler.kv_tokens":
        return config.slime.quantization == "minite"
    if path in ("driver.eval_every", "driver.eval_temperature"):
        return config.slime.eval_data is not None
    section, _, name = path.partition(".")
    return section in _SECTIONS or name in _READ[section].split()


def check_unread(config: RunConfig) -> None:
    """Raises UserError, one line, for all settings that launch does not read and that have another than their default.

    A safety stop that slime has not would otherwise be believed to be on.
    """
    found = [(path, got, default) for path, got, default in _settings(config) if got != default]
    if found:
        told = ", ".join(
            f"{path} {got!r}" + (f" ({_INSTEAD[path]})" if path in _INSTEAD else "") for path, got, _ in found
        )
        mend = " ".join(f"-o {path}={_as_yaml(default)}" for path, _, default in found)
        raise UserError(f"{config.where(found[0][0])}: minite launch does not read {told}: remove it, or add {mend}")
    tokenizer = config.data.tokenizer
    # Either: what engines start from has a copy of the tokenizer of model.checkpoint.
    own = [Path(path).resolve() for path in (config.model.checkpoint, config.slime.checkpoint) if path is not None]
    if tokenizer != "chars" and Path(tokenizer).resolve() not in own:
        raise UserError(
            f"{config.where('data.tokenizer')}: data.tokenizer is {tokenizer!r}, but slime takes the one of "
            f"model.checkpoint; set data.tokenizer: {config.model.checkpoint}"
        )


def _settings(config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """(path, value, default) of every setting that launch does not read."""
    for section in dataclasses.fields(config):
        value = getattr(config, section.name)
        if not dataclasses.is_dataclass(value) or section.name in _SECTIONS:
            continue
        for f in dataclasses.fields(value):
            path = f"{section.name}.{f.name}"
            if not is_read(path, config):
                yield path, getattr(value, f.name), f.default


def _as_yaml(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
