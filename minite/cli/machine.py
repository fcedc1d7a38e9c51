"""The commands about this machine: `minite doctor`, `minite bench`."""

from __future__ import annotations

import argparse

from minite.cli.arguments import Command, add_override, positive


def doctor(args: argparse.Namespace) -> int:
    """Say what this machine can run, and check its numbers. Exit code 1 when a check fails."""
    from minite.backends.doctor import examine

    text, healthy = examine()
    print(text)
    return 0 if healthy else 1


def bench(args: argparse.Namespace) -> int:
    """Measure W4A4 against BF16 on this machine: a training step by phase, and forward passes of one linear."""
    from minite.backends.bench import SHAPES_MNK, measure, table
    from minite.config import load_recipe
    from minite.config.load import shipped
    from minite.driver.bench import measure_steps, step_table

    recipe = args.recipe or shipped("tiny_qwen3_moe_w4a4_grpo.yaml")
    times = measure_steps(load_recipe(recipe, args.override), args.turns)
    print(step_table(times))
    print()
    print(table([measure(shape) for shape in SHAPES_MNK]))
    return 0


def add(command: Command) -> None:
    """Adds this file's commands."""
    command(doctor, "")
    added = command(bench, "step", "step recipes/tiny_qwen3_moe_w4a8_grpo.yaml --turns 9 -o algo.prompts_per_step=32")
    added.add_argument("what", choices=("step",), help="step: one training step of a recipe and of its BF16 twin")
    added.add_argument("recipe", nargs="?", metavar="RECIPE", help="recipe file (default: the tiny W4A4 recipe)")
    added.add_argument("--turns", type=positive, default=5, metavar="N", help="steps of each that count (default: 5)")
    add_override(added)
