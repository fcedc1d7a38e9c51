"""Recipes from anywhere: whatever the text, there is a recipe or one line that says what is wrong, soon."""

from __future__ import annotations

import random
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_files import MOE, write

from minite.config import load_recipe
from minite.config.yaml_tree import parse_yaml
from minite.errors import UserError

BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 10)}]\n" for i in range(1, 12)
)
HOSTILE = {
    "a bomb of aliases": BOMB,
    "an endless alias": "a: &a [*a]",
    "deep lists": "a: " + "[" * 5000 + "]" * 5000,
    "unclosed lists": "a: " + "[" * 5000,
    "deep but closed": "a: " + "[" * 60 + "]" * 60,
    "a very long number": "seed: " + "9" * 10_000,
    "python's own tag": "a: !!python/name:os.system x",
    "a control character": "a: \x00",
    "a lone surrogate": "a: \ud800",
}


def read(text: str) -> None:
    """A value tree, or a UserError of one line; anything else is a defect."""
    try:
        parse_yaml(text, "fuzz.yaml")
    except UserError as error:
        assert "\n" not in str(error) and str(error).startswith("fuzz.yaml")


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_text_is_one_line_and_soon(name):
    started = time.process_time()
    with pytest.raises(UserError, match="fuzz.yaml"):
        parse_yaml(HOSTILE[name], "fuzz.yaml")
    assert time.process_time() - started < 20


def test_brackets_without_end_are_refused_where_they_are_too_many_and_not_after_all_of_them():
    with pytest.raises(UserError, match="more than 50 brackets are open"):
        parse_yaml(HOSTILE["unclosed lists"], "fuzz.yaml")


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(alphabet=st.sampled_from(string.printable + "&*!{}[]:-éÿ\u2028"), max_size=80))
def test_any_text_is_read_or_refused(text):
    read(text)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(st.integers(0, 2**32))
def test_a_damaged_recipe_is_a_recipe_or_a_mistake(tmp_path_factory, seed):
    """Characters of a sound recipe removed, doubled, swapped."""
    rng = random.Random(seed)
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    path = write(folder, MOE)
    text = list(path.read_text())
    for _ in range(rng.randrange(1, 6)):
        at = rng.randrange(len(text))
        text[at] = rng.choice(["", text[at] * 2, rng.choice(string.printable), "\t", "0", "-1", ".nan", "null"])
    path.write_text("".join(text))
    try:
        load_recipe(path)
    except UserError as error:
        assert "\n" not in str(error)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.sampled_from(["driver.steps", "learner.lr", "model.num_heads", "algo.group_size", "sampler.top_p", "data.kind"]),
    st.text(alphabet=st.sampled_from("0123456789.-+einfa[]{}:,'\" "), max_size=12),
)
def test_any_override_is_taken_or_refused(tmp_path_factory, key, value):
    folder = tmp_path_factory.getbasetemp() / "fuzz_overrides"
    folder.mkdir(exist_ok=True)
    try:
        load_recipe(write(folder, MOE), [f"{key}={value}"])
    except UserError as error:
        assert "\n" not in str(error)
