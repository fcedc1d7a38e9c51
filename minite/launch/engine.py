"""What SGLang's engines start from when miniTE's own quantization method computes their linears.

``slime.quantization: minite``. The plan reaches every scheduler process as a file that config.json names, as under
`minite train`; weights come from the learner before the first rollout, so the directory holds none.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from minite.config import PrecisionPlan, RunConfig
from minite.errors import UserError
from minite.launch.slime_args import Flags
from minite.sampler.sglang import launch
from minite.sampler.sglang.names import METHOD

DIRECTORY = "engine"  # in the launch directory: --hf-checkpoint
# Options of sglang.Engine that slime sets itself, or that the recipe decides for both kinds of engines.
_SLIMES = {
    "model_path", "skip_tokenizer_init", "quantization", "custom_weight_loader", "device", "tp_size", "random_seed",
    "enable_fp32_lm_head", "enable_return_routed_experts", "kv_cache_dtype", "max_running_requests", "log_level",
    "enable_deterministic_inference",
}  # fmt: skip


def engine_files(config: RunConfig, plan: PrecisionPlan, directory: Path) -> dict[str, str]:
    """Name in the launch directory -> text: the model's config.json with the plan in it, and the plan."""
    made = launch.model_files(config, plan, "cuda", directory / DIRECTORY)
    return {f"{DIRECTORY}/{name}": text for name, text in made.items()}


def engine_flags(config: RunConfig, plan: PrecisionPlan) -> Flags:
    """The options that `minite train` starts SGLang with, under slime's names."""
    options: dict[str, Any] = launch.arguments(config, plan, "cuda", Path())
    flags: Flags = {
        f"--sglang-{name.replace('_', '-')}": value for name, value in options.items() if name not in _SLIMES
    }
    # slime sends a seed with every request in this mode only; without one all responses of a group would be equal.
    flags["--sglang-enable-deterministic-inference"] = True
    return flags


def copy_tokenizer(checkpoint: Path, directory: Path) -> None:
    """Everything of the BF16 checkpoint but its weights and its config.json: slime and SGLang read the tokenizer."""
    if not checkpoint.is_dir():
        raise UserError(f"model.checkpoint: {checkpoint} is no directory; the engines need its tokenizer")
    for file in sorted(checkpoint.iterdir()):
        weights = file.suffix in (".safetensors", ".bin", ".pt") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copy(file, directory / DIRECTORY / file.name)


def check_engine_directory(directory: Path, plan: PrecisionPlan) -> None:
    """The directory that the engines started from names this plan. Raises UserError."""
    file = directory / "config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))["quantization_config"]
        held = PrecisionPlan.from_json(Path(found["plan"]).read_text(encoding="utf-8"), found["plan"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"--hf-checkpoint: {file} names no plan ({error!r}); start slime with minite launch") from None
    if found["quant_method"] != METHOD or held.digest != plan.digest:
        raise UserError(
            f"--hf-checkpoint: {file} has quant_method {found['quant_method']!r} and plan {held.digest[:12]}, the "
            f"recipe needs {METHOD!r} and {plan.digest[:12]}; launch anew"
        )
