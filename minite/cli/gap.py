"""The command that asks why learner and sampler differ: `minite gap`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from minite.cli.arguments import Command, add_override


def gap(args: argparse.Namespace) -> int:
    """Measure the log-prob gap of a recipe or a run and ask where it comes from. Learner minus sampler, in nats."""
    from minite.driver.gap import examine

    found = examine(args.subject, args.override, args.prompts, layers=args.layers, causes=args.causes, note=_tell)
    if args.html is not None:
        from minite.diagnostics.gap_page import write_page

        _tell(str(write_page(args.html, found)))
    print(json.dumps(found.to_json(), indent=1) if args.json else found.text())
    return 0


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def add(command: Command) -> None:
    """Adds this file's command."""
    recipe = "recipes/tiny_qwen3_moe_w4a4_grpo.yaml"
    added = command(gap, recipe, f"{recipe} --causes", "runs/first --layers --html gap.html")
    added.add_argument(
        "subject", type=Path, metavar="RECIPE|RUN", help="recipe file, or run directory (newest checkpoint)"
    )
    added.add_argument("--prompts", type=Path, metavar="F", help='lines of text, or .jsonl with "prompt"')
    added.add_argument(
        "--layers", action="store_true", help="find the first module that turns equal inputs into others"
    )
    added.add_argument("--causes", action="store_true", help="measure again with one factor changed at a time")
    added.add_argument("--json", action="store_true", help="every value as JSON")
    added.add_argument("--html", type=Path, metavar="FILE", help="write a page too")
    add_override(added)
