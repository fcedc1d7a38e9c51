"""The commands that score a checkpoint: `minite eval`, `minite sensitivity`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from minite.cli.arguments import Command, add_override, positive


def eval_(args: argparse.Namespace) -> int:
    """Score a checkpoint under one or more precision plans. The first recipe is what the others are compared with."""
    from minite.config import load_recipe
    from minite.evaluation.evaluate import evaluate, table, to_json

    configs = [load_recipe(recipe, args.override) for recipe in args.recipe]
    results = evaluate(
        args.checkpoint, configs, args.tasks, lambda line: print(line, file=sys.stderr, flush=True), args.limit
    )
    print(json.dumps(to_json(results), indent=1) if args.json else table(results))
    return 0


def sensitivity(args: argparse.Namespace) -> int:
    """Find which linears a precision plan loses most by, and rules that keep the worst of them in BF16.

    Scores the text of `minite eval` with one group of linears quantized, and with all but that group. --budget takes
    groups back to BF16, those first that save most for their size, until the loss fits.
    """
    from minite.config import load_recipe
    from minite.evaluation.sensitivity import keep, measure, recipe_rules, table

    def tell(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    measured = measure(args.checkpoint, load_recipe(args.recipe, args.override), args.windows, args.parts, tell)
    print(table(measured))
    if args.budget is not None:
        print("\n" + recipe_rules(measured, keep(measured, args.budget)))
    return 0


def add(command: Command) -> None:
    """Adds this file's commands."""
    added = command(
        eval_,
        "models/SmolLM2-135M-Instruct --recipe recipes/smollm2_135m_w4a4_grpo.yaml",
        "models/SmolLM2-135M-Instruct --recipe recipes/smollm2_135m_{bf16,w4a16,w4a4}_grpo.yaml --tasks text greedy",
        "CKPT --recipe BF16.yaml NVFP4.yaml --tasks lm-eval:arc_easy --limit 200",
    )
    added.add_argument("checkpoint", type=Path, metavar="CKPT", help="Hugging Face directory in BF16 or FP32")
    added.add_argument("--recipe", nargs="+", required=True, help="recipes whose precision plans are applied")
    added.add_argument(
        "--tasks", nargs="+", default=["text"], metavar="TASK",
        help="text (perplexity), greedy, heldout (the recipe's questions), lm-eval:NAME or lm-eval:FILE.yaml of "
        "lm-evaluation-harness (default: text)",
    )  # fmt: skip
    added.add_argument("--limit", type=positive, metavar="N", help="first N items of a task of lm-eval (default: all)")
    added.add_argument("--json", action="store_true", help="every value as JSON")
    add_override(added)
    added = command(
        sensitivity,
        "models/SmolLM2-135M-Instruct --recipe recipes/smollm2_135m_w4a4_grpo.yaml",
        "models/SmolLM2-135M-Instruct --recipe recipes/smollm2_135m_w4a4_4o6_grpo.yaml --windows 8 --budget 0.1",
    )
    added.add_argument("checkpoint", type=Path, metavar="CKPT", help="Hugging Face directory in BF16 or FP32")
    added.add_argument("--recipe", required=True, help="recipe whose quantized linears are examined")
    added.add_argument("--budget", type=float, metavar="NATS", help="loss over BF16 that is allowed, per token")
    added.add_argument("--windows", type=positive, default=4, metavar="N", help="windows of the text (default: 4)")
    added.add_argument("--parts", type=positive, default=3, metavar="N", help="cuts of the layers (default: 3)")
    add_override(added)
