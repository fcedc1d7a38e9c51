"""The commands for checkpoint directories: `minite convert`, `minite inspect`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from minite.cli.arguments import Command, add_override

if TYPE_CHECKING:
    from minite.sync.convert import Report


def convert(args: argparse.Namespace) -> int:
    """Convert a checkpoint between Hugging Face BF16, NVFP4 and block FP8. Go on with an interrupted conversion by the
    same command."""
    import torch

    from minite.backends.registry import get_backend
    from minite.cli.progress import ByteProgress
    from minite.config import load_recipe
    from minite.sync.convert import convert as run

    torch.set_num_threads(1)  # tensors are small, and a second core hashes and writes; torch's others would only spin
    recipe = load_recipe(args.recipe, args.override)
    backend = get_backend("auto", device="cpu", strict=False)
    with ByteProgress(args.target.name) as progress:
        report = run(
            args.source, args.target, recipe, backend, args.to, outer_scales=args.outer_scales, progress=progress
        )
    _tell(report, args.target)
    print(args.target)
    return 0


def _tell(report: Report, target: Path) -> None:
    """What was wrong with the scales of a source that others quantized, on stderr; the whole of it is in a file."""
    if report.untied:
        worst = max(report.untied, key=lambda cost: cost.max_relative)
        done = "were given one" if report.shared else "kept several"
        print(
            f"{len(report.untied)} tensors lie in fusion groups with several outer scales, which {done}; the largest "
            f"error of a block {'is' if report.shared else 'of sharing one would be'} {worst.max_relative:.2%} "
            f"({worst.tensor}); see {target}/minite_report.json",
            file=sys.stderr,
        )
    if report.inputs:
        module, fault = next(iter(report.inputs.items()))
        print(
            f"{len(report.inputs)} input scales were unusable and were set anew, the first: {module} was {fault}; "
            f"see {target}/minite_report.json",
            file=sys.stderr,
        )


def inspect(args: argparse.Namespace) -> int:
    """Say what a checkpoint directory holds and which rules it breaks. Exit code 2 when a broken rule makes some reader
    fail or compute wrong numbers, 0 when there are only warnings and notes."""
    import json

    import torch

    from minite.cli.progress import ByteProgress
    from minite.sync.inspect import inspect_directory

    torch.set_num_threads(1)  # as in convert
    with ByteProgress(args.path.name) as progress:
        inspection = inspect_directory(args.path, verify=args.verify, progress=progress)
    print(json.dumps(inspection.json(), indent=1) if args.json else inspection.text())
    return 2 if inspection.broken else 0


def add(command: Command) -> None:
    """Adds this file's commands."""
    recipe = "--recipe recipes/qwen3_30b_a3b_w4a4_grpo.yaml"
    added = command(
        convert,
        f"Qwen3-30B-A3B Qwen3-30B-A3B-NVFP4 {recipe}",
        f"Qwen3-30B-A3B-NVFP4 Qwen3-30B-A3B-again {recipe} --to bf16",
        f"someone-elses-NVFP4 mended-NVFP4 {recipe} --outer-scales shared",
    )
    added.add_argument("source", type=Path, metavar="SRC", help="checkpoint directory to read")
    added.add_argument("target", type=Path, metavar="DST", help="directory to write; must not exist")
    added.add_argument("--recipe", required=True, help="recipe whose precision plan says what is quantized")
    added.add_argument(
        "--to", choices=("nvfp4", "bf16", "fp8"), default="nvfp4", help="format to write (default: nvfp4)"
    )
    added.add_argument(
        "--outer-scales",
        choices=("keep", "shared"),
        default="keep",
        help="NVFP4 sources whose fused modules have several outer scales: keep them (default) or make one of them",
    )
    add_override(added)
    added = command(
        inspect,
        "Qwen3-30B-A3B-NVFP4",
        "Qwen3-30B-A3B-NVFP4 --verify",
        "someone-elses-NVFP4 --json | jq .findings",
    )
    added.add_argument("path", type=Path, metavar="PATH", help="checkpoint directory")
    added.add_argument("--json", action="store_true", help="everything, module by module")
    added.add_argument("--verify", action="store_true", help="compare every tensor with what minite convert wrote")
