"""Whole-segment patterns, against a second implementation that shares nothing with the first."""

from __future__ import annotations

import itertools

import pytest

from minite.config.match import compile_pattern, matches


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("model.layers.*.mlp.gate", "model.layers.0.mlp.gate", True),
        ("model.layers.*.mlp.gate", "model.layers.0.mlp.gate_proj", False),  # what substring filters got wrong
        ("**.gate", "model.layers.0.mlp.gate_proj", False),
        ("**.gate_proj", "model.layers.0.mlp.experts.3.gate_proj", True),
        ("mlp.gate", "model.layers.0.mlp.gate", False),  # a pattern is anchored at both ends
        ("model.layers.1", "model.layers.1.mlp.gate", False),
        ("model.layers.1.**", "model.layers.1.mlp.gate", True),
        ("model.layers.1.**", "model.layers.10.mlp.gate", False),
        ("model.layers.1.**", "model.layers.1", True),  # ** may be nothing
        ("**", "lm_head", True),
        ("*", "lm_head", True),
        ("*", "model.norm", False),
        ("**.mlp.experts.*.*", "model.layers.0.mlp.experts.3.up_proj", True),
        ("**.mlp.experts.*", "model.layers.0.mlp.experts.3.up_proj", False),
        ("a.**.a", "a.a", True),
        ("a.**.a", "a", False),
        ("a.**.**.b", "a.b", True),
        ("a+b", "a+b", True),  # no regular expressions
        ("a+b", "aab", False),
        ("a.b", "aXb", False),
    ],
)
def test_known_cases(pattern, name, expected):
    assert matches(pattern, name) is expected


def _by_recursion(pattern: list[str], name: list[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return _by_recursion(pattern[1:], name) or (bool(name) and _by_recursion(pattern, name[1:]))
    return bool(name) and pattern[0] in ("*", name[0]) and _by_recursion(pattern[1:], name[1:])


def test_equals_plain_recursion_on_all_short_patterns():
    names = [n for length in (1, 2, 3, 4) for n in itertools.product("ab", repeat=length)]
    checked = 0
    for length in (1, 2, 3, 4):
        for pattern in itertools.product(("a", "b", "*", "**"), repeat=length):
            for name in names:
                expected = _by_recursion(list(pattern), list(name))
                assert matches(".".join(pattern), ".".join(name)) is expected, (pattern, name)
                checked += expected
    assert checked > 1000  # both answers occur often


@pytest.mark.parametrize("pattern", ["", "a..b", "a.", "q*", "**x", "a.*_proj", "***"])
def test_partial_segments_are_refused(pattern):
    with pytest.raises(ValueError, match="segment"):
        compile_pattern(pattern)
