"""`minite launch`."""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path

from minite.cli.arguments import Command, add_override
from minite.errors import UserError


def launch(args: argparse.Namespace) -> int:
    """Run a recipe in slime: write its arguments and start slime's own train.py as a Ray job."""
    from minite.config import load_recipe, resolve_plan
    from minite.config.env import megatron_dir, slime_dir
    from minite.launch import engine, files, refuse, resume

    config = load_recipe(args.recipe, args.override)
    plan = resolve_plan(config)
    slime = args.slime_dir or slime_dir()
    if slime is None or not (slime / "train.py").is_file():
        raise UserError(f"--slime-dir: {slime} holds no train.py; give a checkout of slime, or set MINITE_SLIME_DIR")
    directory = (args.out or Path("runs") / f"{config.name}-slime-{time.strftime('%Y%m%d-%H%M%S')}").resolve()
    prepared = files.prepare(
        config, plan, directory, slime.resolve(), args.megatron_dir or megatron_dir(), args.address
    )
    if args.resume:
        found = resume.find(config, plan)
        gap = found.state["gap_abs_mean"]
        print(f"resume after rollout {found.rollout}: plan {plan.digest[:12]}, mean abs gap there {gap:.3g} nats")
    else:
        resume.check_new(config)
    checkpoint = config.model.checkpoint
    assert checkpoint is not None, "files.prepare refuses a recipe without"
    own = config.slime.quantization == "minite"
    if not args.dry_run and not own:
        refuse.check_checkpoint(Path(config.slime.checkpoint or checkpoint), plan)
    files.write(prepared, directory)
    if own:
        engine.copy_tokenizer(Path(checkpoint), directory)
    print(prepared.files["command.sh"], end="")
    print(f"# written to {directory}")
    if args.dry_run:
        print("# dry run: nothing started, and slime.checkpoint not looked at")
        return 0
    return subprocess.run(prepared.command, check=False).returncode


def add(command: Command) -> None:
    """Adds this file's command."""
    added = command(
        launch,
        "recipes/qwen3_30b_a3b_w4a4_grpo.yaml --slime-dir slime --dry-run",
        "recipes/qwen3_30b_a3b_w4a4_grpo.yaml --slime-dir slime --resume",
    )
    added.add_argument("recipe", metavar="RECIPE", help="recipe file")
    added.add_argument("--dry-run", action="store_true", help="write the files and print the command, start nothing")
    added.add_argument("--resume", action="store_true", help="go on from the newest checkpoint under slime.save")
    added.add_argument("--slime-dir", type=Path, metavar="DIR", help="checkout of slime (default: $MINITE_SLIME_DIR)")
    added.add_argument(
        "--megatron-dir", type=Path, metavar="DIR", help="Megatron-LM for slime (default: $MINITE_MEGATRON_DIR)"
    )
    added.add_argument(
        "--out", type=Path, metavar="DIR", help="new directory of the files (default: runs/<recipe>-slime-<time>)"
    )
    added.add_argument(
        "--address", default="http://127.0.0.1:8265", metavar="URL", help="Ray's job server (default: %(default)s)"
    )
    add_override(added)
