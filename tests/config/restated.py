"""Finds what a recipe writes although it already holds: a recipe shows only what it changes."""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from minite.config.build import convert
from minite.config.load import read_layers
from minite.config.schema import RunConfig
from minite.config.yaml_tree import Value
from minite.errors import UserError

_UNSET = object()


def restated_defaults(path: Path) -> list[str]:
    """One line for every value in the file itself that equals what it inherits or the default of schema.py."""
    inherited, own = read_layers(path)
    return _compare(RunConfig, own, inherited, "")


def _compare(hint: Any, own: Value, inherited: Value | None, path: str) -> list[str]:
    """Walk the mappings of ``own`` beside the type hints and beside the inherited tree."""
    assert isinstance(own.data, dict)
    below = inherited.data if inherited is not None and isinstance(inherited.data, dict) else {}
    found: list[str] = []
    for key, value in own.data.items():
        child_hint, default = _child(hint, key)
        name, before = f"{path}.{key}" if path else key, below.get(key)
        if isinstance(value.data, dict):
            found += _compare(child_hint, value, before, name)
        elif before is not None:
            if value.plain() == before.plain():
                found.append(f"{value.source}: '{name}' restates {before.source}; remove it")
        elif convert(child_hint, value, name, {}) == default:
            found.append(f"{value.source}: '{name}' restates its default {default!r}; remove it")
    return found


def _child(hint: Any, key: str) -> tuple[Any, object]:
    """(type, default) of the entry ``key`` in a section or in a mapping of names."""
    if typing.get_origin(hint) is dict:
        return typing.get_args(hint)[1], _UNSET
    fields = {f.name: f for f in dataclasses.fields(hint)}
    if key not in fields:
        raise UserError(f"unknown key '{key}' in {hint.__name__}")
    return typing.get_type_hints(hint)[key], fields[key].default
