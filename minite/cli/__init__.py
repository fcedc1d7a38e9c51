"""The command line. `minite COMMAND --help` shows examples; `python -m minite.cli` is the same as `minite`.

Exit codes: 0 done, 2 a user's mistake, 1 a process of the run died (both one line on stderr), 130 interrupted; a defect
ends with its traceback and 1.
Commands import what they need when they run, so that `minite plan` starts in a fraction of a second.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from minite import __version__
from minite.cli import checkpoints, evaluation, gap, launch, machine, plan, runs
from minite.cli.arguments import Parser, commands_of
from minite.errors import ProcessDied, UserError

_HOMES = (plan, runs, gap, launch, checkpoints, evaluation, machine)  # each adds its commands, in the order of --help


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


def make_parser() -> argparse.ArgumentParser:
    """All commands and their arguments."""
    parser = Parser(prog="minite", description="Native NVFP4 (W4A4) reinforcement learning.")
    parser.add_argument("--version", action="version", version=f"minite {__version__}")
    command = commands_of(parser)
    for home in _HOMES:
        home.add(command)
    return parser
