"""`minite plan`."""

from __future__ import annotations

import argparse
from contextlib import suppress
from pathlib import Path

from minite.cli.arguments import Command, add_override
from minite.errors import UserError


def plan(args: argparse.Namespace) -> int:
    """Print what a recipe decides for every linear."""
    if args.schema:
        from minite.config import schema

        print(Path(schema.__file__).read_text(encoding="utf-8"), end="")
        return 0
    if args.recipe is None:
        raise UserError("plan: no recipe given; expected minite plan RECIPE, or minite plan --schema for all settings")
    from minite.config import load_recipe, resolve_plan

    config = load_recipe(args.recipe, args.override)
    resolved = resolve_plan(config)
    if args.memory is not None:
        if args.json:
            raise UserError("plan: got --memory and --json; give one of them")
        from minite.config.memory import table

        print(table(config, resolved, args.memory))
        return 0
    print(resolved.to_json() if args.json else resolved.table(), end="" if args.json else "\n")
    return 0


def _gib(text: str) -> float:
    with suppress(ValueError):
        if 0 < (value := float(text)) < 1e6:
            return value
    raise argparse.ArgumentTypeError(f"{text} is no memory of a GPU, expected GiB such as 268")


def add(command: Command) -> None:
    """Adds this file's command."""
    added = command(
        plan,
        "recipes/qwen3_30b_a3b_w4a4_grpo.yaml",
        "recipes/tiny_qwen3_moe_w4a4_grpo.yaml -o precision.alignment=strict --json",
        "recipes/qwen3_30b_a3b_w4a4_grpo.yaml --memory 268",
        "--schema",
    )
    added.add_argument("recipe", nargs="?", metavar="RECIPE", help="recipe file")
    added.add_argument("--json", action="store_true", help="the whole plan, one entry per linear, as JSON")
    added.add_argument(
        "--memory",
        type=_gib,
        metavar="GIB",
        help="what a GPU of this memory would hold, computed from shapes and parallel sizes (B300: 268, H200: 131)",
    )
    added.add_argument("--schema", action="store_true", help="every setting of a recipe, its default and its meaning")
    add_override(added)
