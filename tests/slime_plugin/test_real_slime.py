"""Every hook called by slime's own functions, in one process that imports the real slime. See real_slime.py."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from checkout import in_slime

SCRIPT = Path(__file__).with_name("real_slime.py")
CHECKS = [
    node.name
    for file in sorted(SCRIPT.parent.glob("real_slime*.py"))
    for node in ast.parse(file.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]


@pytest.fixture(scope="module")
def results():
    return json.loads(in_slime(SCRIPT.name).splitlines()[-1])


@pytest.mark.parametrize("check", CHECKS)
def test_with_the_real_slime(results, check):
    assert results[check] is None, results[check]
