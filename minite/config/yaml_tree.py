"""YAML text -> a tree of values that remember where they were written.

Scalars follow YAML 1.2, not the 1.1 of PyYAML's defaults: ``off`` and ``yes`` are words, ``1e-6`` is a float, ``010``
is ten and ``1:30`` is text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias

import yaml

from minite.errors import UserError

MAX_NODES, MAX_DEPTH, MAX_DIGITS = 100_000, 50, 100  # far more than any recipe has

Scalar: TypeAlias = str | int | float | bool | None


@dataclass(frozen=True)
class Value:
    """One node. ``source`` is "file:line" of its key (of the item itself in a list), or the override that set it."""

    data: Scalar | tuple[Value, ...] | dict[str, Value]
    source: str

    def plain(self) -> object:
        """The node as ordinary Python data, without sources."""
        if isinstance(self.data, dict):
            return {key: value.plain() for key, value in self.data.items()}
        if isinstance(self.data, tuple):
            return [value.plain() for value in self.data]
        return self.data


def _resolvers() -> dict[str, list[tuple[str, re.Pattern[str]]]]:
    """PyYAML's table of plain scalars: first character -> [(tag, pattern)]. PyYAML tests prefixes, so patterns end."""
    number = r"[-+]?(?:\.[0-9]+|[0-9][0-9_]*(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan"
    kinds = (
        ("null", r"~|null|Null|NULL", "~nN"),
        ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
        ("int", r"[-+]?[0-9][0-9_]*", "-+0123456789"),
        ("float", number, "-+.0123456789"),
    )
    table: dict[str, list[tuple[str, re.Pattern[str]]]] = {"": [("tag:yaml.org,2002:null", re.compile(r"\Z"))]}
    for tag, pattern, first in kinds:
        for character in first:
            entry = (f"tag:yaml.org,2002:{tag}", re.compile(rf"(?:{pattern})\Z"))
            table.setdefault(character, []).append(entry)
    return table


class _Loader(yaml.SafeLoader):
    """SafeLoader with the plain scalars of YAML 1.2 (core schema), plus ``_`` between digits."""

    yaml_implicit_resolvers = _resolvers()

    def fetch_flow_collection_start(self, token: type[yaml.Token]) -> None:
        """Stops at a depth that no recipe has: PyYAML's time grows with the square of it."""
        if self.flow_level > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"more than {MAX_DEPTH} brackets are open", problem_mark=self.get_mark())
        super().fetch_flow_collection_start(token)


def parse_yaml(text: str, file: str, source: str | None = None) -> Value:
    """Parse one document; an empty one is an empty mapping.

    ``source`` replaces "file:line" (overrides have no lines). Raises UserError for text that is not YAML, with line and
    column, and for a key written twice.
    """
    try:
        node = yaml.compose(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = source or (f"{file}:{mark.line + 1}:{mark.column + 1}" if mark else file)
        hint = " (quote a pattern that starts with *)" if "alias" in f"{error.context} {error.problem}" else ""
        raise UserError(f"{where}: not readable as YAML: {error.problem or error.context}{hint}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{source or file}: not readable as YAML: {' '.join(str(error).split())}") from None
    except (RecursionError, ValueError) as error:  # nested for the sake of it; characters that YAML does not know
        what = "nested too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise UserError(f"{source or file}: not readable as YAML: {what}") from None
    if node is None:
        return Value({}, source or f"{file}:1")
    _check_size(node, source or file)
    return _convert(node, file, source)


def _check_size(root: yaml.Node, where: str) -> None:
    """Aliases make a few lines into a tree without end, or of any size: counted before anything is built."""
    waiting, count = [(root, 0)], 0
    while waiting:
        node, depth = waiting.pop()
        count += 1
        if count > MAX_NODES or depth > MAX_DEPTH:
            raise UserError(
                f"{where}: more than {MAX_NODES} values or {MAX_DEPTH} levels, aliases counted; simplify it"
            )
        if isinstance(node, yaml.SequenceNode):
            waiting += [(item, depth + 1) for item in node.value]
        elif isinstance(node, yaml.MappingNode):
            waiting += [(value, depth + 1) for _, value in node.value]


def _convert(node: yaml.Node, file: str, source: str | None, line: int | None = None) -> Value:
    where = source or f"{file}:{(node.start_mark.line if line is None else line) + 1}"
    if isinstance(node, yaml.SequenceNode):
        return Value(tuple(_convert(item, file, source) for item in node.value), where)
    if isinstance(node, yaml.MappingNode):
        entries: dict[str, Value] = {}
        for key_node, value_node in node.value:
            key, key_line = str(key_node.value), key_node.start_mark.line
            value = _convert(value_node, file, source, key_line)
            if key in entries:
                raise UserError(f"{value.source}: key '{key}' is written twice, first at {entries[key].source}")
            entries[key] = value
        return Value(entries, where)
    return Value(_scalar(node, where), where)


def _scalar(node: yaml.Node, where: str) -> Scalar:
    text = str(node.value)
    kind = node.tag.rpartition(":")[2]
    if kind == "null":
        return None
    if kind == "bool":
        return text.lower() == "true"
    if kind == "int":
        if len(text) > MAX_DIGITS:
            raise UserError(f"{where}: a whole number of {len(text)} digits; at most {MAX_DIGITS} make sense here")
        return int(text.replace("_", ""))
    if kind == "float":
        return float(text.replace("_", "").replace(".inf", "inf").replace(".nan", "nan"))
    if kind == "str":
        return text
    raise UserError(f"{where}: YAML tag '{node.tag}' is not used in recipes; got '{text}', expected a plain value")


def merge(base: Value, over: Value) -> Value:
    """``over`` on top of ``base``: mappings merge key by key, everything else (lists too) replaces."""
    if not (isinstance(base.data, dict) and isinstance(over.data, dict)):
        return over
    merged = dict(base.data)
    for key, value in over.data.items():
        merged[key] = merge(merged[key], value) if key in merged else value
    return Value(merged, over.source)


def nested(path: str, value: Value) -> Value:
    """``a.b.c`` and a value -> the tree {a: {b: {c: value}}}."""
    for key in reversed(path.split(".")):
        value = Value({key: value}, value.source)
    return value
