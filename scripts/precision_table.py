"""Run the tiny recipe in every precision and print the table of README.md.

    scripts/environment.sh must have made the environment: run scripts/train or scripts/test once before.
    .venv/bin/python scripts/precision_table.py [--steps N] [--runs DIR] [-o section.key=value ...]

Runs that DIR already holds are not repeated.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

ROWS = {  # recipe suffix -> what the row is called
    "bf16": "BF16",
    "w4a16": "W4A16",
    "w4a8": "W4A8 (MXFP8 activations)",
    "w4a4": "W4A4, aligned",
    "w4a4_unaligned": "W4A4, tensor-wide amax",
    "w4a4_fp8kv": "W4A4, FP8 KV cache",
    "w4a4_strict": "W4A4, strict",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--runs", type=Path, default=Path("runs/precision_table"))
    parser.add_argument("-o", dest="overrides", action="append", default=[])
    args = parser.parse_args()
    print("| precision | held-out accuracy, start -> end | mean abs gap [nats] | p99 abs gap | max abs gap | run [s] |")
    print("|---|---|---|---|---|---|", flush=True)
    for suffix, name in ROWS.items():
        run_dir = args.runs / suffix
        if not run_dir.exists():
            train(suffix, run_dir, args)
        print(row(name, run_dir), flush=True)


def train(suffix: str, run_dir: Path, args: argparse.Namespace) -> None:
    command = [sys.executable, "-m", "minite.cli", "train", f"recipes/tiny_qwen3_moe_{suffix}_grpo.yaml"]
    command += ["--run-dir", str(run_dir)] + ([] if args.steps is None else ["--steps", str(args.steps)])
    command += [part for override in args.overrides for part in ("-o", override)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def row(name: str, run_dir: Path) -> str:
    """Means over all steps, the largest of the maxima; accuracy of the first and of the last evaluation."""
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    accuracy = [r["accuracy/heldout"] for r in records if "accuracy/heldout" in r]
    steps = [r for r in records if "gap/abs_mean" in r]
    mean, p99 = (statistics.mean(r[key] for r in steps) for key in ("gap/abs_mean", "gap/abs_p99"))
    largest = max(r["gap/abs_max"] for r in steps)
    seconds = sum(r["time/step"] for r in steps)
    gaps = f"{mean:.1e} | {p99:.1e} | {largest:.1e}"
    return f"| {name} | {accuracy[0]:.1%} -> {accuracy[-1]:.1%} | {gaps} | {seconds:.0f} |"


if __name__ == "__main__":
    main()
