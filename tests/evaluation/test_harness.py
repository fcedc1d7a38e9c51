"""Tasks of lm-evaluation-harness: what it is told, against the model asked directly, and what users see."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from tiny_checkpoint import config, recipe, write_checkpoint

from minite.cli import main
from minite.errors import UserError
from minite.evaluation import subject
from minite.evaluation.harness import answers, first_metric, loglikelihoods, until
from minite.evaluation.tasks import find

CHOICE = {
    "task": "letters", "dataset_path": "json", "test_split": "train", "output_type": "multiple_choice",
    "doc_to_text": "{{question}}", "doc_to_choice": "{{choices}}", "doc_to_target": "{{label}}",
    "metric_list": [{"metric": "acc", "aggregation": "mean", "higher_is_better": True}],
}  # fmt: skip
ITEMS = [{"question": f"{i} of", "choices": ["b", "ccc", "ee"], "label": i % 3} for i in range(6)]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    folder = tmp_path_factory.mktemp("harness")
    write_checkpoint(folder / "tiny")
    return subject.load(folder / "tiny", config(folder, folder / "tiny"))


def task_file(folder: Path, **changes: object) -> str:
    """lm-eval:FILE of a task, in JSON, which YAML contains, with its data beside it."""
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    data = {"dataset_kwargs": {"data_files": str(folder / "items.jsonl")}}
    (folder / "task.yaml").write_text(json.dumps(CHOICE | data | changes))
    return f"lm-eval:{folder / 'task.yaml'}"


@pytest.fixture
def library(tmp_path, monkeypatch):
    pytest.importorskip("lm_eval", reason="needs pip install 'minite[lm-eval]'")
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


def quiet(line: str) -> None:
    pass


def test_likelihoods_are_of_the_answer_alone_and_say_whether_it_is_greedy(loaded):
    context = loaded.tokenizer.encode("what is")
    best = list(loaded.continuations([context], 3)[0].tokens)
    cut: list[int] = []
    pairs = [(context, best), (context, [*best[:2], 7]), ([0] * 200, best)]
    (greedy, likeliest), (other, unlikely), _ = loglikelihoods(loaded, pairs, cut)
    (scores,) = loaded.logprobs([[*context, *best]])
    assert greedy == pytest.approx(sum(scores[-3:]), abs=1e-5) and likeliest
    assert other < greedy and not unlikely
    assert cut == [200 + 3 - loaded.room]


def test_answers_end_before_the_stop_text_and_keep_their_order(loaded):
    long, short = ("a long one", {"max_gen_toks": 9}), ("short", {"max_gen_toks": 2, "until": []})
    texts = answers(loaded, "t", [long, short, long], [])
    prompts = [loaded.tokenizer.encode(text) for text in ("a long one", "short")]
    expected = [
        loaded.tokenizer.decode(loaded.continuations([p], n)[0].tokens) for p, n in zip(prompts, (9, 2), strict=True)
    ]
    assert texts == [expected[0], expected[1], expected[0]]
    assert until("one\ntwo. three", ["\n", "."]) == "one" and until("a.b", ".") == "a" and until("ab", [""]) == "ab"
    with pytest.raises(UserError, match="draws its answers at random"):
        answers(loaded, "t", [("x", {"do_sample": True})], [])
    with pytest.raises(UserError, match="asks for 256 new tokens, model.max_seq_len is 160"):
        answers(loaded, "t", [("x", {})], [])


def test_one_number_an_item_of_the_first_filter():
    item = {"filter": "none", "metrics": ["acc", "acc_norm"], "acc": 1, "acc_norm": 0.0}
    samples = {"a": [item, item | {"filter": "strict"}], "b": [item | {"acc": 0}]}
    assert first_metric("t", samples) == ("acc", (1.0, 0.0))
    with pytest.raises(UserError, match=r"got \(3.0, 2\) as acc of an item, expected a number"):
        first_metric("t", {"a": [item | {"acc": (3.0, 2)}]})


def test_a_task_of_choices_is_judged_as_the_model_scores(loaded, library, tmp_path):
    name = task_file(tmp_path)
    outcome = find([name], 5)[name](loaded, quiet)
    expected = []
    for item in ITEMS[:5]:
        prompt = loaded.tokenizer.encode(item["question"])
        answers_ = [loaded.tokenizer.encode(" " + choice) for choice in item["choices"]]
        sums = [sum(s[len(prompt) - 1 :]) for s in loaded.logprobs([prompt + answer for answer in answers_])]
        expected.append(float(torch.tensor(sums).argmax() == item["label"]))
    assert outcome.metric == "acc" and outcome.value_N == tuple(expected) and 0 < outcome.mean < 1
    assert "5 items, 0 examples in each prompt" in outcome.about


def test_command_pairs_the_items_of_two_recipes(library, tmp_path, capsys):
    write_checkpoint(tmp_path / "tiny")
    recipes = [
        str(recipe(tmp_path, "exact", tmp_path / "tiny")),
        str(recipe(tmp_path, "w4", tmp_path / "tiny", "nvfp4_2d")),
    ]
    name = task_file(
        tmp_path, output_type="generate_until", doc_to_choice=None, doc_to_target="b",
        generation_kwargs={"max_gen_toks": 4, "do_sample": False, "until": ["\n"]},
        metric_list=[{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    )  # fmt: skip
    command = ["eval", str(tmp_path / "tiny"), "--recipe", *recipes, "--tasks", name, "--limit", "4"]
    assert main(command) == 0
    assert "| recipe | exact_match [95 %] | minus exact [95 %] |" in capsys.readouterr().out


def test_mistakes(loaded, library, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    no_defaults = TaskManager(include_defaults=False)  # all take a minute to read
    monkeypatch.setattr("lm_eval.tasks.TaskManager", lambda include_defaults: no_defaults)
    with pytest.raises(UserError, match="no such task, and there is no such file; 'lm-eval ls tasks' lists them"):
        find(["lm-eval:no_such"])
    with pytest.raises(UserError, match="its data cannot be had: .*download them, or give a file"):
        find([task_file(tmp_path, dataset_kwargs={"data_files": str(tmp_path / "none.jsonl")})])
    name = task_file(tmp_path, output_type="loglikelihood_rolling", metric_list=[{"metric": "word_perplexity"}])
    with pytest.raises(UserError, match="measures whole texts, not items; use task text"):
        find([name])[name](loaded, quiet)


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match=r"lm-eval:arc_easy needs lm_eval.*; run pip install 'minite\[lm-eval\]'"):
        find(["lm-eval:arc_easy"])
