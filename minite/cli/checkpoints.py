"""The commands for checkpoint directories: `minite convert`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from minite.cli.arguments import Command, add_override


def convert(args: argparse.Namespace) -> int:
    """Convert a checkpoint between Hugging Face BF16 and NVFP4."""
    from minite.config import load_recipe
    from minite.sync import modelopt

    modelopt.convert(args.source, args.target, load_recipe(args.recipe, args.override), args.to, _tell_tenths)
    print(args.target)
    return 0


def _tell_tenths(done: int, total: int) -> None:
    """Ten lines of progress on stderr, however many tensors there are."""
    if done * 10 // total > (done - 1) * 10 // total:
        print(f"{done} of {total} tensors", file=sys.stderr)


def add(command: Command) -> None:
    """Adds this file's command."""
    added = command(convert, "Qwen3-30B-A3B Qwen3-30B-A3B-NVFP4 --recipe recipes/qwen3_30b_a3b_w4a4_grpo.yaml")
    added.add_argument("source", type=Path, metavar="SRC", help="checkpoint directory to read")
    added.add_argument("target", type=Path, metavar="DST", help="directory to write; must not exist")
    added.add_argument("--recipe", required=True, help="recipe whose precision plan says what is quantized")
    added.add_argument("--to", choices=("nvfp4", "bf16"), default="nvfp4", help="format to write (default: nvfp4)")
    add_override(added)
