"""The command that scores a checkpoint: `minite eval`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from minite.cli.arguments import Command, add_override


def eval_(args: argparse.Namespace) -> int:
    """Score a checkpoint under one or more precision plans. The first recipe is what the others are compared with."""
    from minite.config import load_recipe
    from minite.evaluation.evaluate import evaluate, table, to_json

    configs = [load_recipe(recipe, args.override) for recipe in args.recipe]
    results = evaluate(args.checkpoint, configs, args.tasks, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(to_json(results), indent=1) if args.json else table(results))
    return 0


def add(command: Command) -> None:
    """Adds this file's command."""
    added = command(
        eval_,
        "models/SmolLM2-135M-Instruct --recipe recipes/smollm2_135m_w4a4_grpo.yaml",
        "models/SmolLM2-135M-Instruct --recipe recipes/smollm2_135m_{bf16,w4a16,w4a4}_grpo.yaml --tasks text greedy",
    )
    added.add_argument("checkpoint", type=Path, metavar="CKPT", help="Hugging Face directory in BF16 or FP32")
    added.add_argument("--recipe", nargs="+", required=True, help="recipes whose precision plans are applied")
    added.add_argument(
        "--tasks", nargs="+", default=["text"], metavar="TASK", help="text (perplexity), greedy (default: text)"
    )
    added.add_argument("--json", action="store_true", help="every value as JSON")
    add_override(added)
