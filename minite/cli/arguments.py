"""What commands share: the parser, how a command is added, arguments that several of them take."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import NoReturn, Protocol

from minite.errors import UserError

Run = Callable[[argparse.Namespace], int]  # its docstring is the command's help; returns the exit code


class Command(Protocol):
    """Adds the command named after ``run``; ``examples`` are its arguments, shown by --help."""

    def __call__(self, run: Run, *examples: str) -> argparse.ArgumentParser: ...


class Parser(argparse.ArgumentParser):
    """Mistakes in arguments are reported like all others: one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see {self.prog} --help")


def commands_of(parser: argparse.ArgumentParser) -> Command:
    """The way to add commands to ``parser``."""
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)

    def command(run: Run, *examples: str) -> argparse.ArgumentParser:
        about, name = (run.__doc__ or "").strip(), run.__name__.rstrip("_")  # eval_ must not hide Python's eval
        added: argparse.ArgumentParser = commands.add_parser(
            name,
            help=about.partition("\n\n")[0].partition(". ")[0].rstrip("."),
            description=about,
            epilog="examples:\n" + "\n".join(f"  minite {name} {example}".rstrip() for example in examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        added.set_defaults(run=run)
        return added

    return command


def add_override(parser: argparse.ArgumentParser) -> None:
    """-o SECTION.KEY=VALUE, as args.override."""
    parser.add_argument(
        "-o",
        "--override",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="set one setting; may be given again",
    )


def positive(text: str) -> int:
    """An argument type: a whole number from 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is less than 1")
    return value
