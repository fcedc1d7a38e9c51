"""The command line. `minite COMMAND --help` shows examples; `python -m minite.cli` is the same as `minite`.

Exit codes: 0 done, 2 a user's mistake, 1 a process of the run died (both one line on stderr), 130 interrupted; a defect
ends with its traceback and 1.
Commands import what they need when they run, so that `minite plan` starts in a fraction of a second.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from minite import __version__
from minite.errors import ProcessDied, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code."""
    try:
        args = make_parser().parse_args(argv)
        run: Callable[[argparse.Namespace], int] = args.run
        code = run(args)
        sys.stdout.flush()
        return code
    except (UserError, ProcessDied) as error:
        print("minite: error: " + " ".join(str(error).splitlines()), file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        print("minite: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # `minite plan ... | head` closed our output: nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def plan(args: argparse.Namespace) -> int:
    """Print what a recipe decides for every linear."""
    if args.schema:
        from minite.config import schema

        print(Path(schema.__file__).read_text(encoding="utf-8"), end="")
        return 0
    if args.recipe is None:
        raise UserError("plan: no recipe given; expected minite plan RECIPE, or minite plan --schema for all settings")
    from minite.config import load_recipe, resolve_plan

    resolved = resolve_plan(load_recipe(args.recipe, args.override))
    print(resolved.to_json() if args.json else resolved.table(), end="" if args.json else "\n")
    return 0


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


class _Parser(argparse.ArgumentParser):
    """Mistakes in arguments are reported like all others: one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def make_parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    parser = _Parser(prog="minite", description="Native NVFP4 (W4A4) reinforcement learning.")
    parser.add_argument("--version", action="version", version=f"minite {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run: Callable[[argparse.Namespace], int], *examples: str) -> argparse.ArgumentParser:
        about = (run.__doc__ or "").strip()
        added = commands.add_parser(
            run.__name__,
            help=about.partition(". ")[0].rstrip("."),
            description=about,
            epilog="examples:\n" + "\n".join(f"  minite {run.__name__} {example}".rstrip() for example in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        return added

    _add_plan(command)
    _add_runs(command)
    added = command(convert, "Qwen3-30B-A3B Qwen3-30B-A3B-NVFP4 --recipe recipes/qwen3_30b_a3b_w4a4_grpo.yaml")
    added.add_argument("source", type=Path, metavar="SRC", help="checkpoint directory to read")
    added.add_argument("target", type=Path, metavar="DST", help="directory to write; must not exist")
    added.add_argument("--recipe", required=True, help="recipe whose precision plan says what is quantized")
    added.add_argument("--to", choices=("nvfp4", "bf16"), default="nvfp4", help="format to write (default: nvfp4)")
    _add_override(added)
    command(doctor, "")
    added = command(bench, "step", "step recipes/tiny_qwen3_moe_w4a8_grpo.yaml --turns 9 -o algo.prompts_per_step=32")
    added.add_argument("what", choices=("step",), help="step: one training step of a recipe and of its BF16 twin")
    added.add_argument("recipe", nargs="?", metavar="RECIPE", help="recipe file (default: the tiny W4A4 recipe)")
    added.add_argument("--turns", type=_positive, default=5, metavar="N", help="steps of each that count (default: 5)")
    _add_override(added)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value


_Command = Callable[..., argparse.ArgumentParser]


def _add_plan(command: _Command) -> None:
    added = command(
        plan,
        "recipes/qwen3_30b_a3b_w4a4_grpo.yaml",
        "recipes/tiny_qwen3_moe_w4a4_grpo.yaml -o precision.alignment=strict --json",
        "--schema",
    )
    added.add_argument("recipe", nargs="?", metavar="RECIPE", help="recipe file")
    added.add_argument("--json", action="store_true", help="the whole plan, one entry per linear, as JSON")
    added.add_argument("--schema", action="store_true", help="every setting of a recipe, its default and its meaning")
    _add_override(added)


def _add_runs(command: _Command) -> None:
    added = command(
        train,
        "recipes/tiny_qwen3_moe_w4a4_grpo.yaml",
        "recipes/tiny_qwen3_moe_w4a4_grpo.yaml --steps 20 -o learner.lr=1e-5 --run-dir runs/first",
    )
    added.add_argument("recipe", metavar="RECIPE", help="recipe file")
    added.add_argument("--run-dir", type=Path, metavar="DIR", help="new directory (default: runs/<recipe>-<time>)")
    added.add_argument("--steps", type=int, metavar="N", help="short for -o driver.steps=N")
    _add_override(added)

    added = command(resume, "runs/first", "runs/first -o driver.steps=200")
    added.add_argument("run_dir", type=Path, metavar="RUN", help="directory of the run")
    _add_override(added)

    added = command(report, "runs/first")
    added.add_argument("run_dir", type=Path, metavar="RUN", help="directory of the run")


def _add_override(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "-o",
        "--override",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="set one setting; may be given again",
    )


if __name__ == "__main__":
    sys.exit(main())
