"""reasoning_gym as a source of questions and rewards."""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterator
from dataclasses import replace

import pytest

from minite.config.schema import DataConfig
from minite.driver import reasoning
from minite.driver.data import TASKS, Example, score
from minite.driver.reward import Scorer
from minite.errors import UserError

DATA = DataConfig(
    kind="reasoning_gym", questions=40, tasks={"chain_sum": {"max_terms": 2, "max_digits": 2}, "gcd": {"max_value": 9}}
)


@pytest.fixture
def examples() -> list[Example]:
    pytest.importorskip(
        "reasoning_gym", reason="reasoning_gym is not installed (extra reasoning; matplotlib and 80 MB with it)"
    )
    return TASKS["reasoning_gym"](DATA)


@pytest.mark.parametrize(
    "answer", ["__import__('os').system('id')", "open('x')", "x.__class__", "lambda: 0", "a[0]", "exec", "1;2"]
)
def test_what_is_more_than_a_formula_reaches_no_parser(answer: str) -> None:
    """sympy's parse_expr is Python's eval with more names."""
    assert not reasoning._FORMULA.fullmatch(answer)
    assert reasoning._FORMULA.fullmatch("2*x**3 - sin(x)/(4 + .5)")


def test_every_answer_of_a_task_has_full_marks_and_others_what_its_scorer_says(examples: list[Example]) -> None:
    names = [e.entry["metadata"]["source_dataset"] for e in examples if e.entry]
    assert names.count("chain_sum") > 20 and names.count("gcd") > 20
    assert all(score(e, e.answer) == score(e, f" {e.answer}\n") == 1.0 for e in examples)
    assert all(score(e, f"<answer>x</answer> so <answer> {e.answer} </answer>") == 1.0 for e in examples)
    sum_ = next(e for e in examples if e.entry and e.entry["metadata"]["source_dataset"] == "chain_sum")
    assert score(sum_, "no number") == score(sum_, "") == 0.0
    assert 0 < score(sum_, f"it is {sum_.answer}") < 1  # the library gives a part for an answer among other words


def test_questions_are_the_same_each_time_and_each_there_once(examples: list[Example]) -> None:
    again = TASKS["reasoning_gym"](DATA)
    assert again == examples and len({e.prompt for e in examples}) == len(examples)
    for example in examples:
        assert example.entry and reasoning.unpacked(reasoning.packed(example.entry)) == example.entry


@pytest.mark.parametrize(
    ("tasks", "expected"),
    [
        ({"chain_sm": {}}, "reasoning_gym has no 'chain_sm'; nearest is 'chain_sum'"),
        ({"chain_sum": {"terms": 2}}, "data.tasks.chain_sum: .*unexpected keyword argument 'terms'"),
        ({"string_insertion": {}}, "runs a model's answer as Python"),
        ({"n_queens": {}}, "runs a model's answer as Python"),
        ({"chain_sum": {"min_terms": 0}}, "data.tasks.chain_sum: min_terms must be positive"),
    ],
)
def test_what_does_not_exist_is_told(examples: list[Example], tasks: dict, expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        reasoning.questions(replace(DATA, tasks=tasks))


def test_an_answer_that_a_scorer_cannot_parse_is_wrong(examples: list[Example]) -> None:
    entry = reasoning.questions(replace(DATA, tasks={"prime_factorization": {}}))[0]
    assert reasoning.score(entry, "2 and 3") < 1.0


def test_scorers_that_evaluate_an_answer_are_all_known(examples: list[Example]) -> None:
    """A new version of the package may have more of them."""
    from reasoning_gym.factory import DATASETS

    bodies = {name: inspect.getsource(made.score_answer) for name, (made, _) in DATASETS.items()}
    evals = {name for name, body in bodies.items() if "eval(answer" in body}
    parses = {name for name, body in bodies.items() if "parse_expr(answer" in body}
    assert evals == reasoning.RUNS_ANSWERS and parses == reasoning.PARSES_ANSWERS


@pytest.mark.parametrize("task", sorted(reasoning.PARSES_ANSWERS))
def test_only_formulas_reach_sympy(examples: list[Example], task: str, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    entries = reasoning.questions(replace(DATA, tasks={task: {}}, questions=25))
    assert all(reasoning._FORMULA.fullmatch(e["answer"]) for e in entries)
    for code in ("open('ran', 'w').write('x')", "(1).__class__", "S('1')", "exec(1)", "[1 for x in 'a']"):
        assert reasoning.score(entries[0], code) == 0.0
    assert not list(tmp_path.iterdir())


@pytest.fixture
def countdown(examples: list[Example]) -> Iterator[tuple[Scorer, Example]]:
    data = replace(DATA, tasks={"countdown": {}}, questions=1, reward_timeout=2.0)
    scorer = Scorer(data)
    yield scorer, TASKS["reasoning_gym"](data)[0]
    scorer.close()


def test_an_answer_that_never_ends_is_wrong_and_the_next_is_scored(countdown: tuple[Scorer, Example]) -> None:
    scorer, example = countdown
    assert scorer(example, f"<answer>{example.answer}</answer>") == 1.0
    started = time.monotonic()
    assert scorer(example, "9**9**9**9") == 0.0 and scorer.ended == 1
    assert time.monotonic() - started < 30
    assert scorer(example, example.answer) == 1.0 and scorer.ended == 1


def test_a_function_of_the_recipe_is_given_the_answer(examples: list[Example], tmp_path, monkeypatch) -> None:
    (tmp_path / "same_text.py").write_text("def score(response, answer):\n    return response == answer\n")
    monkeypatch.chdir(tmp_path)
    scorer = Scorer(replace(DATA, reward="same_text.score"))
    assert scorer(examples[0], examples[0].answer) == 1.0
    scorer.close()


def test_a_missing_package_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reasoning, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"data.kind is reasoning_gym, but .*pip install 'minite\[reasoning\]'"):
        reasoning.questions(DATA)
