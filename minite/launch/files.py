"""The files of one launch, and the command that uses them.

config.yaml         --custom-config-path: the recipe and the plan's digest, which the plugin checks on every rank
plan.json           the plan, for people: nothing of slime reads it
runtime_env.yaml    environment of the Ray job, engines included
te.yaml             only for backend te: megatron's --te-precision-config-file
engine/             only for slime.quantization minite: what the engines start from
command.sh          starts it
"""

from __future__ import annotations

import json
import os
import shlex
from dataclasses import dataclass
from pathlib import Path

import yaml

import minite
from minite.config import PrecisionPlan, RunConfig, config_to_dict
from minite.config.env import third_party_env
from minite.errors import UserError
from minite.launch import engine, te
from minite.launch.refuse import check
from minite.launch.slime_args import Flags, slime_arguments, words

BOOT = "slime_plugin.boot.setup"  # Ray imports it by name: minite never imports the plugin


@dataclass(frozen=True)
class Launch:
    """Everything that decides a start of slime."""

    arguments: list[str]  # of train.py
    command: list[str]
    files: dict[str, str]  # name -> text


def prepare(
    config: RunConfig, plan: PrecisionPlan, directory: Path, slime_dir: Path, megatron_dir: Path | None, address: str
) -> Launch:
    """Arguments, command and file texts; nothing is written. Raises UserError for what slime cannot do."""
    own: Flags = {"--custom-config-path": str(directory / "config.yaml")}
    files = {"plan.json": plan.to_json()}
    if plan.backend == "te":
        files["te.yaml"] = _yaml(te.precision_file(plan))
        own["--te-precision-config-file"] = str(directory / "te.yaml")
    env = third_party_env(plan)
    train_env = {name: value for name, value in env.items() if name.startswith("NVTE_")}
    own["--train-env-vars"] = json.dumps(train_env)
    decided = slime_arguments(config, plan)
    job: dict[str, object] = {}
    if config.slime.quantization == "minite":
        files |= engine.engine_files(config, plan, directory)
        decided |= {"--hf-checkpoint": str(directory / engine.DIRECTORY), **engine.engine_flags(config, plan)}
        job["worker_process_setup_hook"] = BOOT
        env["SGLANG_SERVER_INFO_TIMEOUT"] = "60"  # [s]; an engine that answers later than this proves nothing
    check(config, plan, decided)

    paths = [slime_dir, *([megatron_dir] if megatron_dir else []), Path(minite.__file__).resolve().parents[1]]
    job_env = {
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",  # megatron orders communication by it
        **{name: value for name, value in env.items() if name not in train_env},
    }
    files["config.yaml"] = _yaml({"minite": {"recipe": config_to_dict(config), "plan_digest": plan.digest}})
    files["runtime_env.yaml"] = _yaml({"env_vars": job_env, **job})
    arguments = words({**decided, **own}) + list(config.slime.extra)
    command = ["ray", "job", "submit", f"--address={address}", "--runtime-env", str(directory / "runtime_env.yaml")]
    command += ["--", "python3", str(slime_dir / "train.py"), *arguments]
    files["command.sh"] = f"#!/bin/sh\nexec {_lines(command)}\n"
    return Launch(arguments, command, files)


def write(launch: Launch, directory: Path) -> None:
    """Writes the files. Raises UserError when the directory exists."""
    try:
        directory.mkdir(parents=True)
    except FileExistsError:
        raise UserError(f"--out: {directory} exists; give a new directory") from None
    for name, text in launch.files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    (directory / "command.sh").chmod(0o755)


def _yaml(data: object) -> str:
    return yaml.safe_dump(data, sort_keys=False, width=120)


def _lines(command: list[str]) -> str:
    """The command for a shell, one flag a line."""
    lines: list[str] = []
    for word in command:
        quoted = shlex.quote(word)
        if word.startswith("--") or not lines or word == "python3":
            lines.append(quoted)
        else:
            lines[-1] += f" {quoted}"
    return " \\\n  ".join(lines)
