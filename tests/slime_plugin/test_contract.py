"""The plugin's functions take what slime passes; where slime is, it still passes that. No import of slime."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from checkout import needs_slime
from seams import SEAMS

from minite.launch.slime_args import HOOKS, MODEL
from slime_plugin import patches

ROOT = Path(__file__).parents[2]


def parameters(dotted):
    """(positional or keyword parameter names, those without default) of a function, from its source."""
    module, _, name = dotted.rpartition(".")
    tree = ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    function = next(node for node in tree.body if isinstance(node, functions) and node.name == name)
    return tuple(a.arg for a in [*function.args.args, *function.args.kwonlyargs])


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.flag)
def test_our_function_has_slimes_parameters(seam):
    assert parameters(seam.ours) == seam.parameters


@pytest.mark.parametrize("seam", SEAMS, ids=lambda seam: seam.flag)
def test_slime_calls_it_as_recorded(seam):
    slime, _ = needs_slime()
    assert seam.call in (slime / seam.file).read_text(encoding="utf-8")
    assert f'"{seam.flag}"' in (slime / "slime/utils/arguments.py").read_text(encoding="utf-8")


def test_launch_names_functions_of_the_table():
    table = {seam.flag: seam.ours for seam in SEAMS}
    named = {flag: value for flag, value in HOOKS.items() if isinstance(value, str)}
    assert named.items() <= table.items() and table["--custom-model-provider-path"] == MODEL


def test_the_readme_has_every_seam_and_no_other():
    text = (ROOT / "slime_plugin/README.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `--")]
    assert len(rows) == len(SEAMS)
    for seam, row in zip(SEAMS, rows, strict=True):
        cells = [cell.strip(" `") for cell in row.strip("|").split("|")]
        assert cells[:3] == [seam.flag, seam.ours.removeprefix("slime_plugin."), seam.file], row


def test_the_patches_name_the_readme_version():
    assert patches.SLIME.split()[0] in (ROOT / "slime_plugin/README.md").read_text(encoding="utf-8")
