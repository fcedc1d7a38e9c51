"""The commands that make a run and look at it: `minite train`, `minite resume`, `minite report`."""

from __future__ import annotations

import argparse
import time
from pathlib import Path

from minite.cli.arguments import Command, add_override


def train(args: argparse.Namespace) -> int:
    """Run a recipe into a new run directory."""
    from minite.config import load_recipe

    overrides = list(args.override)
    if args.steps is not None:
        overrides.append(f"driver.steps={args.steps}")
    config = load_recipe(args.recipe, overrides)
    run_dir = args.run_dir or Path("runs") / f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    from minite.driver import loop

    loop.train(config, run_dir)
    return 0


def resume(args: argparse.Namespace) -> int:
    """Go on with a run from its newest whole checkpoint."""
    from minite.driver import loop

    loop.resume(args.run_dir, tuple(args.override))
    return 0


def report(args: argparse.Namespace) -> int:
    """Write RUN/report.html."""
    from minite.diagnostics.report import write_report

    print(write_report(args.run_dir))
    return 0


def add(command: Command) -> None:
    """Adds this file's commands."""
    added = command(
        train,
        "recipes/tiny_qwen3_moe_w4a4_grpo.yaml",
        "recipes/tiny_qwen3_moe_w4a4_grpo.yaml --steps 20 -o learner.lr=1e-5 --run-dir runs/first",
    )
    added.add_argument("recipe", metavar="RECIPE", help="recipe file")
    added.add_argument("--run-dir", type=Path, metavar="DIR", help="new directory (default: runs/<recipe>-<time>)")
    added.add_argument("--steps", type=int, metavar="N", help="short for -o driver.steps=N")
    add_override(added)

    added = command(resume, "runs/first", "runs/first -o driver.steps=200")
    added.add_argument("run_dir", type=Path, metavar="RUN", help="directory of the run")
    add_override(added)

    added = command(report, "runs/first")
    added.add_argument("run_dir", type=Path, metavar="RUN", help="directory of the run")
