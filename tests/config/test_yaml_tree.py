"""Scalars by YAML 1.2, places kept, unreadable text named by line and column, merging."""

from __future__ import annotations

import math

import pytest
from recipe_files import message

from minite.config.yaml_tree import merge, nested, parse_yaml


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1e-6", 1e-6),  # text in YAML 1.1
        ("1E6", 1e6),
        (".5", 0.5),
        ("-2.", -2.0),
        ("1_000.5", 1000.5),
        ("+.inf", math.inf),
        ("7", 7),
        ("-16_384", -16384),
        ("010", 10),  # 8 in YAML 1.1
        ("0", 0),
        ("true", True),
        ("False", False),
        ("off", "off"),  # False in YAML 1.1
        ("yes", "yes"),
        ("1:30", "1:30"),  # 90 in YAML 1.1
        ("2026-01-02", "2026-01-02"),
        ("1.2.3", "1.2.3"),
        ("1e", "1e"),
        ("-", "-"),
        ("~", None),
        ("null", None),
        ("nullable", "nullable"),
        ("'1e-6'", "1e-6"),
    ],
)
def test_scalars(text, expected):
    if text == "-":  # a bare dash starts a list; quoted it is text
        text = "'-'"
    got = parse_yaml(f"x: {text}\n", "f").plain()["x"]
    assert got == expected
    assert type(got) is type(expected)


def test_empty_value_is_null_and_empty_text_is_a_mapping():
    assert parse_yaml("x:\ny: 1\n", "f").plain() == {"x": None, "y": 1}
    assert parse_yaml("# only a comment\n", "f").plain() == {}
    assert math.isnan(parse_yaml("x: .nan", "f").plain()["x"])


def test_source_is_the_line_of_the_key_and_of_the_item():
    tree = parse_yaml("a:\n  b: 1\n  c:\n    - x\n    - {d: 2}\n", "f.yaml")
    assert tree.data["a"].source == "f.yaml:1"
    assert tree.data["a"].data["b"].source == "f.yaml:2"
    assert tree.data["a"].data["c"].source == "f.yaml:3"
    assert tree.data["a"].data["c"].data[1].source == "f.yaml:5"
    assert tree.data["a"].data["c"].data[1].data["d"].source == "f.yaml:5"


def test_unreadable_yaml_names_line_and_column():
    assert message(parse_yaml, "a:\n  b: [1, 2\nc: 3\n", "f.yaml").startswith("f.yaml:3:2: not readable as YAML: ")
    assert message(parse_yaml, "a: 1\n b: 2\n", "f.yaml").startswith("f.yaml:2:3: not readable as YAML: ")
    assert message(parse_yaml, "a: \x00", "f.yaml").startswith("f.yaml: not readable as YAML: ")


def test_unquoted_star_gets_a_hint():
    text = message(parse_yaml, "match: **.mlp\n", "f.yaml")
    assert text.startswith("f.yaml:1:") and text.endswith("(quote a pattern that starts with *)")


def test_key_written_twice():
    text = message(parse_yaml, "a:\n  b: 1\n  b: 2\n", "f.yaml")
    assert text == "f.yaml:3: key 'b' is written twice, first at f.yaml:2"


def test_tags_are_refused():
    assert "YAML tag '!thing' is not used in recipes" in message(parse_yaml, "a: !thing 3", "f.yaml")


def test_merge_goes_key_by_key_and_replaces_lists():
    base = parse_yaml("a: {x: 1, y: [1, 2]}\nb: 3\n", "base")
    over = parse_yaml("a: {y: [9], z: 4}\nc: {d: 5}\n", "over")
    merged = merge(base, over)
    assert merged.plain() == {"a": {"x": 1, "y": [9], "z": 4}, "b": 3, "c": {"d": 5}}
    assert merged.data["a"].data["x"].source == "base:1"
    assert merged.data["a"].data["y"].source == "over:1"
    assert base.plain() == {"a": {"x": 1, "y": [1, 2]}, "b": 3}  # untouched


def test_nested_path():
    assert nested("a.b.c", parse_yaml("7", "f")).plain() == {"a": {"b": {"c": 7}}}
