"""Tasks, the split, and the prompt stream."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from minite.config.schema import DataConfig, ModelConfig, RunConfig, SamplerConfig
from minite.driver.data import PromptStream, Task, load_task, reward, split
from minite.driver.tokenizer import CharTokenizer
from minite.errors import UserError

MODEL = ModelConfig("qwen3", 1, 16, 1, 1, 16, vocab_size=32, intermediate_size=32, max_seq_len=32)


def config_for(seed: int = 0, **data: object) -> RunConfig:
    return RunConfig("test", MODEL, seed=seed, data=DataConfig(**data), sampler=SamplerConfig(max_new_tokens=16))


def load(seed: int = 0, **data: object) -> Task:
    return load_task(config_for(seed, **data), CharTokenizer())


def test_arithmetic_makes_every_question_with_its_answer_once() -> None:
    task = load(max_operand=12, operations=("+", "-", "*"), heldout=30)
    examples = task.train + task.heldout
    made = {e.prompt: e.answer for e in examples}
    assert len(made) == len(examples) <= 3 * 13 * 13
    for prompt, answer in made.items():
        assert eval(prompt.rstrip("=")) == int(answer)
    assert made["3-5="] == "-2" or "3-5=" in {e.prompt for e in task.heldout}


def test_modular_numbers_are_equally_wide_and_answers_stand_units_first() -> None:
    task = load(kind="modular", max_operand=11, heldout=20)
    examples = task.train + task.heldout
    assert len({e.prompt for e in examples}) == len(examples) >= 12 * 12 - 1
    for e in examples:
        a, b = int(e.prompt[:2]), int(e.prompt[3:5])
        assert e.prompt == f"{a:02}+{b:02}=" and len(e.answer) == 2
        assert int(e.answer[::-1]) == (a + b) % 12
        assert e.wrong is not None and int(e.wrong[::-1]) == (a + b + 1) % 12


@pytest.mark.parametrize("seed", [0, 1, 17])
def test_split_holds_out_exactly_the_number_and_never_the_mirror_of_a_training_question(seed: int) -> None:
    task = load(seed, max_operand=20, operations=("+", "*"), heldout=101)
    assert len(task.heldout) == 101
    assert len(task.train) >= 2 * 21 * 21 - 102  # one mirror image may fall between the sides
    assert not {e.key for e in task.train} & {e.key for e in task.heldout}
    assert "5+3" not in {e.key for e in task.train + task.heldout}


def test_split_depends_on_the_seed_and_not_on_the_order() -> None:
    examples = list(load(max_operand=20, heldout=0).train)
    assert split(examples, 50, 3) == split(examples[::-1], 50, 3)
    assert split(examples, 50, 3).heldout != split(examples, 50, 4).heldout


def test_holding_out_everything_is_an_error() -> None:
    with pytest.raises(UserError, match=r"data.heldout: 999 of 16 examples leave none"):
        load(max_operand=3, heldout=999)


def test_too_many_questions_is_an_error() -> None:
    with pytest.raises(UserError, match=r"data.max_operand: 9999 .* makes 100000000 questions"):
        load(max_operand=9999)


def test_prompt_that_leaves_no_room_is_an_error(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "1" * 17, "answer": "2"}, {"prompt": "3", "answer": "4"}])
    with pytest.raises(UserError, match="has 17 tokens, at most 16 fit"):
        load(kind="jsonl", path=path, heldout=0)


def write(folder: Path, records: list[object]) -> str:
    path = folder / "questions.jsonl"
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
    return str(path)


def test_jsonl_reads_every_line_and_skips_blank_ones(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": "1=", "answer": "1", "source": "x"}, "", {"prompt": "2=", "answer": "2"}])
    task = load(kind="jsonl", path=path, heldout=1)
    assert sorted(e.prompt for e in task.train + task.heldout) == ["1=", "2="]


def test_a_repeated_prompt_is_never_on_both_sides(tmp_path: Path) -> None:
    path = write(tmp_path, [{"prompt": f"{i % 10}=", "answer": str(i)} for i in range(40)])
    task = load(kind="jsonl", path=path, heldout=5)
    assert not {e.prompt for e in task.train} & {e.prompt for e in task.heldout}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "1=", "answer": ', r"questions.jsonl:2: not JSON"),
        ('{"prompt": "1="}', r"questions.jsonl:2: no key 'answer' among \['prompt'\]"),
        ('{"prompt": "1=", "answer": 1}', r"questions.jsonl:2: 'answer' is 1; expected text"),
        ('{"prompt": "", "answer": "1"}', r"questions.jsonl:2: 'prompt' is ''"),
        ("[1, 2]", r"questions.jsonl:2: got \[1, 2\]"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, [{"prompt": "1=", "answer": "1"}, line])
    with pytest.raises(UserError, match=message):
        load(kind="jsonl", path=path, heldout=0)


def test_bad_paths_are_named(tmp_path: Path) -> None:
    right = write(tmp_path, [])
    cases = {
        str(tmp_path / "qestions.jsonl"): r"does not exist.*nearest is 'questions.jsonl'",
        str(tmp_path / "no" / "such"): "does not exist",
        str(tmp_path): "is a directory",
        right: r"is empty; expected lines",
    }
    for path, message in cases.items():
        with pytest.raises(UserError, match=message):
            load(kind="jsonl", path=path, heldout=0)
    Path(right).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="questions.jsonl:1: not UTF-8"):
        load(kind="jsonl", path=right, heldout=0)


def test_reward_is_exact_match() -> None:
    assert reward("95", "95") == reward(" 95 ", "95") == 1.0
    assert [reward(text, "95") for text in ("", "9", "955", "095", "9 5", "-95")] == [0.0] * 6


def stream(seed: int = 0) -> PromptStream:
    return PromptStream(load(max_operand=4, heldout=5).train, CharTokenizer(), seed)


def test_stream_gives_each_example_once_an_epoch_in_a_new_order() -> None:
    size = len(load(max_operand=4, heldout=5).train)
    prompts = stream().take(3 * size)
    assert [p.id for p in prompts] == list(range(3 * size))
    epochs = [[p.example.prompt for p in prompts[i * size : (i + 1) * size]] for i in range(3)]
    assert all(sorted(e) == sorted(epochs[0]) and len(set(e)) == size for e in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert prompts[0].tokens == tuple(CharTokenizer().encode(prompts[0].example.prompt))


@pytest.mark.parametrize("before", [0, 1, 7, 20, 43])
def test_resumed_stream_goes_on_exactly(before: int) -> None:
    whole, first, second = stream(), stream(), stream()
    expected = whole.take(before + 30)[before:]
    first.take(before)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.take(11) + second.take(19) == expected


def test_resuming_on_other_data_or_seed_is_an_error() -> None:
    saved = stream().state_dict()
    changed = [replace(e, answer=e.answer + "0") for e in load(max_operand=4, heldout=5).train]
    for other in (stream(seed=1), PromptStream(changed, CharTokenizer(), 0)):
        with pytest.raises(UserError, match="differ from those of the checkpoint"):
            other.load_state_dict(saved)
