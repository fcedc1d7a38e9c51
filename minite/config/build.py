"""Value trees -> the frozen dataclasses of schema.py, checked by their type hints."""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable
from typing import Any

from minite.config.schema import RunConfig
from minite.config.yaml_tree import Value
from minite.errors import UserError


def nearest(word: str, known: Iterable[str]) -> str:
    """The end of an error message: the most similar known name or, when none is similar, all of them."""
    names = list(known)
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    if close:
        return f"nearest is '{close[0]}'"
    return f"known: {', '.join(names)}" if names else "none exist"


def build(cls: type, value: Value, path: str, sources: dict[str, str]) -> Any:
    """Build dataclass ``cls`` from a mapping; ``path`` is the dotted name for messages. Fills ``sources`` by path.

    Raises UserError for an unknown or missing key and for a value of the wrong type.
    """
    if not isinstance(value.data, dict):
        raise _wrong_type(path or "recipe", value, f"a section of {cls.__name__} keys")
    known = {f.name: f for f in dataclasses.fields(cls) if "internal" not in f.metadata}
    hints = typing.get_type_hints(cls)
    given: dict[str, Any] = {}
    for key, item in value.data.items():
        child = f"{path}.{key}" if path else key
        if key not in known:
            raise UserError(f"{item.source}: unknown key '{child}'; {_nearest_key(key, path, known)}")
        sources[child] = item.source
        given[key] = convert(hints[key], item, child, sources)
    for name, f in known.items():
        if name not in given and f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            child = f"{path}.{name}" if path else name
            raise UserError(f"{value.source}: '{child}' is missing; it has no default, so the recipe must set it")
    return cls(**given)


def convert(hint: Any, value: Value, path: str, sources: dict[str, str]) -> Any:
    """One value as the type ``hint`` says. An int is accepted as a float; nothing else is converted."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if dataclasses.is_dataclass(hint):
        return build(typing.cast(type, hint), value, path, sources)
    if origin is dict and isinstance(value.data, dict):
        for key, item in value.data.items():
            sources[f"{path}.{key}"] = item.source
        return {key: convert(args[1], item, f"{path}.{key}", sources) for key, item in value.data.items()}
    if origin is tuple and isinstance(value.data, tuple):
        for i, item in enumerate(value.data):
            sources[f"{path}[{i}]"] = item.source
        return tuple(convert(args[0], item, f"{path}[{i}]", sources) for i, item in enumerate(value.data))
    if origin in (types.UnionType, typing.Union):
        for option in args:
            try:
                return convert(option, value, path, sources)
            except UserError:
                continue
        raise _wrong_type(path, value, _type_name(hint))
    if hint is float and type(value.data) is int:
        return float(value.data)
    if hint is type(None) and value.data is None:
        return None
    if type(value.data) is hint:
        return value.data
    raise _wrong_type(path, value, _type_name(hint))


def _type_name(hint: Any) -> str:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is type(None):
        return "null"
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_type_name(option) for option in args)
    if origin is tuple:
        return f"a list of {_type_name(args[0])}"
    if origin is dict:
        return "a mapping of names"
    return str(getattr(hint, "__name__", hint))


def _wrong_type(path: str, value: Value, expected: str) -> UserError:
    got = value.plain()
    if got is None:
        return UserError(f"{value.source}: '{path}' is empty, expected {expected}")
    kinds: dict[type, str] = {dict: "a section", list: "a list"}
    kind = kinds.get(type(got), type(got).__name__)
    return UserError(f"{value.source}: '{path}' is {kind} {got!r}, expected {expected}")


def _nearest_key(key: str, path: str, known: Iterable[str]) -> str:
    """Where the key lives if another section has it, else the most similar key of this one."""
    if not path or "." not in path:
        for section, cls in typing.get_type_hints(RunConfig).items():
            if dataclasses.is_dataclass(cls) and key in {f.name for f in dataclasses.fields(cls)}:
                return f"it belongs to section '{section}': {section}.{key}"
    return nearest(key, known)
