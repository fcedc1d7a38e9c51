"""The commands about this machine: `minite doctor`, `minite bench`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from minite.cli.arguments import Command, add_override, positive
from minite.errors import UserError


def doctor(args: argparse.Namespace) -> int:
    """Say what this machine can run, and check its numbers. Exit code 1 when a check fails."""
    from minite.backends.doctor import examine

    text, healthy = examine()
    print(text)
    return 0 if healthy else 1


def bench(args: argparse.Namespace) -> int:
    """Measure this machine: W4A4 against BF16, or the quantizers against a copy."""
    return _bench_quantize(args) if args.what == "quantize" else _bench_step(args)


def _bench_step(args: argparse.Namespace) -> int:
    from minite.backends.bench import SHAPES_MNK, measure, table
    from minite.config import load_recipe
    from minite.config.load import shipped
    from minite.driver.bench import measure_steps, step_table

    recipe = args.recipe or shipped("tiny_qwen3_moe_w4a4_grpo.yaml")
    times = measure_steps(load_recipe(recipe, args.override), args.turns)
    print(step_table(times))
    print()
    rows = [measure(shape) for shape in SHAPES_MNK]
    print(table(rows))
    _write(args.json, {"step": dataclasses.asdict(times), "forward": [dataclasses.asdict(row) for row in rows]})
    return 0


def _bench_quantize(args: argparse.Namespace) -> int:
    from minite.backends.bench_quantize import machine, measure, table

    if args.recipe is not None or args.override:
        raise UserError("bench quantize: got a recipe or -o, which it does not read; leave them out")
    where = machine()
    print(where)
    rates = measure(turns=args.turns)
    print(table(rates))
    _write(args.json, {"machine": where, "quantize": [dataclasses.asdict(rate) for rate in rates]})
    return 0


def _write(path: Path | None, figures: object) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def add(command: Command) -> None:
    """Adds this file's commands."""
    command(doctor, "")
    added = command(
        bench,
        "step",
        "step recipes/tiny_qwen3_moe_w4a8_grpo.yaml --turns 9 -o algo.prompts_per_step=32",
        "quantize --json rates.json",
    )
    added.add_argument(
        "what",
        choices=("step", "quantize"),
        help="step: a training step of a recipe and of its BF16 twin by phase, and forward passes of one linear; "
        "quantize: GB/s of the NVFP4 quantizers of a CPU beside a copy, one thread",
    )
    added.add_argument("recipe", nargs="?", metavar="RECIPE", help="recipe file (default: the tiny W4A4 recipe)")
    added.add_argument("--turns", type=positive, default=5, metavar="N", help="runs of each that count (default: 5)")
    added.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    add_override(added)
