"""Recipe file + overrides -> RunConfig.

``extends`` names other recipe files, looked up beside the file and then in the recipes folder, merged left to right
under the file's own keys; ``-o a.b.c=value`` comes last. A section with a ``kind`` may be a bare word.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from minite.config.build import build, nearest
from minite.config.checks import check_run
from minite.config.schema import RunConfig
from minite.config.secrets import check_secrets, looks_secret
from minite.config.yaml_tree import Value, merge, nested, parse_yaml
from minite.errors import UserError

# The recipes that ship with miniTE: in a source tree, and where setup.py installs them.
SHIPPED = (Path(__file__).resolve().parents[2] / "recipes", Path(sys.prefix) / "share" / "minite" / "recipes")


def load_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read, merge, type-check and cross-check a recipe. ``overrides`` are the texts of ``-o``: "a.b.c=value".

    Raises UserError naming file, line, key and the nearest right name.
    """
    tree = read_tree(Path(path))
    for text in overrides:
        tree = merge(tree, _override(text))
    if isinstance(tree.data, dict) and "name" not in tree.data:
        tree = merge(nested("name", Value(Path(path).stem, f"{path}:1")), tree)
    return _to_config(tree)


def shipped(name: str) -> Path:
    """A recipe that comes with miniTE. Raises UserError when it was not installed."""
    for folder in SHIPPED:
        if (folder / name).is_file():
            return folder / name
    raise UserError(f"{name}: not in {' or '.join(map(str, SHIPPED))}; give a recipe file")


def config_to_dict(config: RunConfig) -> dict[str, Any]:
    """The whole resolved configuration as JSON-ready data (config.json of a run)."""
    data = dataclasses.asdict(config)
    del data["sources"]
    return data


def config_from_dict(data: Mapping[str, Any], source: str, overrides: Sequence[str] = ()) -> RunConfig:
    """The inverse of config_to_dict, with ``-o`` overrides; ``source`` (a file name) stands in error messages."""
    tree = _located(data, source)
    for text in overrides:
        tree = merge(tree, _override(text))
    return _to_config(tree)


def read_tree(path: Path) -> Value:
    """A recipe file with everything it extends, merged but not yet type-checked."""
    inherited, own = read_layers(path)
    return merge(inherited, own)


def read_layers(path: Path, chain: tuple[Path, ...] = ()) -> tuple[Value, Value]:
    """(what the file inherits through ``extends``, what it writes itself). ``chain``: the files being read, outermost
    first."""
    shown = _shown(path)
    own = _bare_words(parse_yaml(_read(path), shown))
    if not isinstance(own.data, dict):
        raise UserError(f"{own.source}: a recipe is a mapping of sections, got {own.plain()!r}")
    here = (*chain, path.resolve())
    inherited = Value({}, own.source)
    for name, source in _extends(own):
        base = _find(name, path, source)
        if base.resolve() in here:
            raise UserError(f"{source}: 'extends' runs in a circle: {' -> '.join(p.name for p in here)} -> {base.name}")
        inherited = merge(inherited, merge(*read_layers(base, here)))
    return inherited, Value({key: value for key, value in own.data.items() if key != "extends"}, own.source)


def _extends(tree: Value) -> list[tuple[str, str]]:
    value = tree.data.get("extends") if isinstance(tree.data, dict) else None
    if value is None:
        return []
    if not isinstance(value.data, tuple) or not all(isinstance(item.data, str) for item in value.data):
        raise UserError(f"{value.source}: 'extends' is {value.plain()!r}, expected a list of recipe files")
    return [(str(item.data), item.source) for item in value.data]


def _find(name: str, path: Path, source: str) -> Path:
    """The file that ``extends`` means: beside the recipe, in the recipes folder above it, in the shipped recipes."""
    above = [parent for parent in path.resolve().parents if parent.name == "recipes"]
    folders = [path.parent, *above[:1], *SHIPPED]
    for folder in folders:
        if (folder / name).is_file():
            return folder / name
    known = [str(p.relative_to(folder)) for folder in folders[1:] for p in sorted(folder.rglob("*.yaml"))]
    raise UserError(f"{source}: 'extends' names '{name}', which does not exist; {nearest(name, dict.fromkeys(known))}")


def _read(path: Path) -> str:
    if not path.is_file():
        what = "a directory, expected a recipe file" if path.is_dir() else "no such recipe"
        folder = path if path.is_dir() else path.parent
        folder = next(f for f in (folder, *SHIPPED) if f is SHIPPED[-1] or any(f.glob("*.yaml")))
        known = [p.name for p in sorted(folder.glob("*.yaml"))]
        raise UserError(f"{path}: {what}; in {_shown(folder)}: {nearest(path.name, known)}")
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read: {error}; expected UTF-8 YAML text") from None


def _override(text: str) -> Value:
    key, equals, value = text.partition("=")
    key, source = key.strip(), f"-o {text}"
    if looks_secret(key):
        source = f"-o {key}=***"  # no setting is of such a name: the message that says so must not repeat the rest
    if not equals or not all(part.isidentifier() for part in key.split(".")):
        raise UserError(f"{source}: expected -o section.key=value")
    parsed = parse_yaml(value, "override", source) if value.strip() else Value(None, source)
    return _bare_words(nested(key, parsed))


def _bare_words(tree: Value) -> Value:
    """``sampler: sglang`` -> ``sampler: {kind: sglang}`` for every section that has a kind."""
    if not isinstance(tree.data, dict):
        return tree
    hints = typing.get_type_hints(RunConfig)
    entries = dict(tree.data)
    for section, value in tree.data.items():
        cls = hints.get(section)
        has_kind = dataclasses.is_dataclass(cls) and "kind" in {f.name for f in dataclasses.fields(cls)}
        if has_kind and isinstance(value.data, str):
            entries[section] = Value({"kind": value}, value.source)
    return Value(entries, tree.source)


def _to_config(tree: Value) -> RunConfig:
    sources: dict[str, str] = {}
    config: RunConfig = build(RunConfig, tree, "", sources)
    config = dataclasses.replace(config, sources=sources)
    check_run(config)
    check_secrets(config)
    return config


def _located(data: object, source: str) -> Value:
    if isinstance(data, Mapping):
        return Value({str(key): _located(item, source) for key, item in data.items()}, source)
    if isinstance(data, list | tuple):
        return Value(tuple(_located(item, source) for item in data), source)
    return Value(typing.cast(Any, data), source)


def _shown(path: Path) -> str:
    """The path as messages show it: relative to the working directory when it lies below."""
    resolved, here = path.resolve(), Path.cwd()
    return str(resolved.relative_to(here)) if resolved.is_relative_to(here) else str(path)
