"""What setup.py says, against the source: scripts/release_check tries the whole of it, which takes minutes."""

from __future__ import annotations

import ast
import itertools
import re
import runpy
import sys
from typing import Any

import pytest
import setuptools

from tests.test_imports import FILES, ROOT, imports

# Import names that are not the name of the package that brings them.
PACKAGES = {
    "yaml": "pyyaml",
    "megatron": "megatron-core",
    "triton": "torch",  # torch for a GPU brings this and the next
    "cuda": "torch",
}
UNPACKAGED = {
    "minite",
    "slime_plugin",
    "slime",
    "sglang_router",
}  # the last two come from slime: its repository, its image


@pytest.fixture(scope="module")
def given() -> dict[str, Any]:
    """The arguments of setup()."""
    arguments: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.setattr(setuptools, "setup", arguments.update)
        runpy.run_path("setup.py")
    return arguments


def undeclared(source: str, declared: set[str]) -> set[str]:
    """Packages that a file imports and that are not ``declared``."""
    tops = {name.partition(".")[0] for _, name in imports(ast.parse(source), "") if name} - sys.stdlib_module_names
    return {PACKAGES.get(top, top.replace("_", "-")) for top in tops - UNPACKAGED} - declared


def test_every_imported_package_is_declared(given: dict[str, Any]) -> None:
    extras = [wanted for extra, wanted in given["extras_require"].items() if extra != "dev"]  # no user installs that
    wanted = itertools.chain(given["install_requires"], *extras)
    declared = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in wanted}
    for file in (*FILES, *(ROOT / "slime_plugin").rglob("*.py")):
        assert undeclared(file.read_text(encoding="utf-8"), declared) == set(), file
    assert undeclared("import yaml, os\ndef f():\n    from lm_eval.x import y", {"pyyaml"}) == {"lm-eval"}


def test_every_file_that_is_no_python_and_no_page_is_package_data(given: dict[str, Any]) -> None:
    """A header that is left out lets the wheel build and no kernel with it."""
    folder = ROOT / "minite"
    packed = {path for pattern in given["package_data"]["minite"] for path in folder.glob(pattern)}
    others = {p for p in folder.rglob("*.*") if p.is_file() and p.suffix not in (".py", ".md", ".pyc")}
    assert others == packed and {"gemm_types.hpp", "py.typed"} <= {p.name for p in packed}


def test_every_recipe_is_installed_where_it_is_looked_for(given: dict[str, Any]) -> None:
    installed = {path: target for target, paths in given["data_files"] for path in paths}
    recipes = [path.relative_to(ROOT) for path in (ROOT / "recipes").rglob("*.yaml")]
    assert installed == {str(path): f"share/minite/{path.parent}" for path in recipes}


def test_every_folder_with_modules_is_a_package(given: dict[str, Any]) -> None:
    """One without __init__.py can be imported from a checkout, but the wheel does not hold it."""
    folders = {f.parent.relative_to(ROOT) for top in ("minite", "slime_plugin") for f in (ROOT / top).rglob("*.py")}
    assert {str(folder).replace("/", ".") for folder in folders} == set(given["packages"])


def test_the_table_of_dependencies_has_each_with_the_version_that_is_pinned(given: dict[str, Any]) -> None:
    wanted = itertools.chain(given["install_requires"], *given["extras_require"].values())
    names = {re.split(r"[^\w-]", requirement)[0].lower() for requirement in wanted}
    rows = [line.split("|") for line in (ROOT / "CONTRIBUTING.md").read_text().splitlines() if line.count("|") == 5]
    table = {name.strip().lower(): row[2].strip() for row in rows for name in row[1].split(",")}
    assert names <= set(table)
    pins = (ROOT / "constraints.txt").read_text() + (ROOT / "scripts" / "sglang_cpu.txt").read_text()
    pinned = {
        name.lower().replace("_", "-"): version for name, version in re.findall(r"^([\w-]+)==([\w.]+)", pins, re.M)
    }
    numbered = {name: version for name, version in table.items() if name in names and version[0].isdigit()}
    assert len(numbered) > 15 and numbered == {name: pinned.get(name) for name in numbered}
