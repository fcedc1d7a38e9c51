"""The math-verify reward, with the real package where it is installed."""

from __future__ import annotations

import asyncio
import importlib.util
from types import SimpleNamespace

import pytest

from slime_plugin.reward import math_verify

CASES = [
    ("Half of it, so \\boxed{\\frac{1}{2}}.", "0.5", 1.0),
    ("The answer is \\boxed{12}", "12", 1.0),
    ("First \\boxed{3}. No: \\boxed{4}", "4", 1.0),
    ("The answer is \\boxed{13}", "12", 0.0),
    ("I do not know.", "12", 0.0),
    ("", "12", 0.0),
    ("\\boxed{x^2-1}", "(x-1)(x+1)", 1.0),
]


@pytest.mark.skipif(importlib.util.find_spec("math_verify") is None, reason="needs the package math-verify")
@pytest.mark.parametrize(("response", "label", "expected"), CASES)
def test_compares_answers_as_mathematics(response, label, expected):
    assert asyncio.run(math_verify(None, SimpleNamespace(response=response, label=label))) == expected
