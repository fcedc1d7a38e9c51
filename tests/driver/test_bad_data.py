"""Data files from anywhere, through the command: examples, or one line, exit code 2, soon and with little memory."""

from __future__ import annotations

import json
import random
import re
import time
import tracemalloc
from pathlib import Path

import pytest

from minite.cli import main
from minite.config.schema import DataConfig
from minite.driver.data import MAX_LINE, jsonl
from minite.errors import UserError
from tests.driver.tiny_run import files, recipe

GOOD = [json.dumps({"prompt": f"{i}+1=", "answer": str(i + 1)}) for i in range(8)]
# name: the third line of eight, what the message says
HOSTILE = {
    "truncated": (GOOD[2][:-5].encode(), "questions.jsonl:3: not JSON"),
    "not UTF-8": (b'{"prompt": "\xff", "answer": "1"}', "questions.jsonl:3: not UTF-8"),
    "zeros, as a crash leaves them": (b"\0" * 4096, "questions.jsonl:3: not JSON"),
    "half a surrogate pair": (rb'{"prompt": "\ud800", "answer": "1"}', "questions.jsonl:3: 'prompt' has half of a"),
    "a list": (b"[" + b"1," * 100_000 + b"1]", r"questions.jsonl:3: got \[1, 1.*\.\.\.; expected"),
    "nested for the sake of it": (b"[" * 100_000 + b"]" * 100_000, "questions.jsonl:3: not JSON .nested too deep"),
    "a number without end": (b'{"prompt": ' + b"9" * 10_000 + b"}", "questions.jsonl:3: not JSON"),
    "an answer of a wrong type": (b'{"prompt": "1=", "answer": ["1"]}', r"'answer' is \['1'\]; expected text"),
    "a large answer of a wrong type": (
        json.dumps({"prompt": "1=", "answer": list(range(100_000))}).encode(),
        r"'answer' is \[0, 1.*\.\.\.; expected text",
    ),
    "many other keys": (json.dumps(dict.fromkeys(map(str, range(100_000)))).encode(), "no key 'prompt' among .*'0'"),
    "a key that is missing": (b'{"prompt": "1="}', "no key 'answer' among"),
    "a character the tokenizer has not": (b'{"prompt": "caf\xc3\xa9", "answer": "1"}', "which is not one of"),
    "a prompt that is too long": (json.dumps({"prompt": "1" * 1000, "answer": "1"}).encode(), "has 1000 tokens"),
    "a line without end": (b"x" * (4 * MAX_LINE), "questions.jsonl:3: a line of more than 16 MiB"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_one_line_and_leaves_nothing(name, tmp_path, monkeypatch, capsys):
    line, message = HOSTILE[name]
    monkeypatch.chdir(tmp_path)
    recipe(tmp_path)
    lines = [text.encode() for text in GOOD]
    Path("questions.jsonl").write_bytes(b"\n".join([*lines[:2], line, *lines[2:]]))
    started = time.process_time()
    options = ["data.kind=jsonl", "data.path=questions.jsonl", "data.heldout=1"]
    assert main(["train", "tiny.yaml", *(word for o in options for word in ("-o", o))]) == 2
    assert time.process_time() - started < 10
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and len(err) < 500
    assert re.search(message, err), err
    assert files(tmp_path) == ["questions.jsonl", "tiny.yaml"]


def test_a_file_of_one_endless_line_is_not_read_into_memory(tmp_path):
    path = tmp_path / "endless.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 36)  # 64 GiB that take no room
    tracemalloc.start()
    with pytest.raises(UserError, match="a line of more than 16 MiB"):
        jsonl(DataConfig(kind="jsonl", path=str(path)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_LINE


def test_any_damage_gives_examples_or_one_line(tmp_path):
    """Bytes of a sound file removed, doubled, changed; the file cut anywhere."""
    path, sound, refused = tmp_path / "fuzz.jsonl", "\n".join(GOOD).encode(), 0
    for seed in range(300):
        rng, data = random.Random(seed), bytearray(sound)
        for _ in range(rng.randrange(3)):
            at = rng.randrange(len(data))
            data[at : at + 1] = rng.choice(
                [b"", data[at : at + 1] * 2, bytes([rng.randrange(256)]), b"\n", b'"', b"\\"]
            )
        path.write_bytes(data[: rng.randrange(1, len(data))] if seed % 3 == 0 else data)
        try:
            examples = jsonl(DataConfig(kind="jsonl", path=str(path)))
        except UserError as error:
            refused += 1
            assert "\n" not in str(error) and len(str(error)) < 500
        else:
            assert all(example.prompt.encode() and example.answer.encode() for example in examples)
    assert 50 < refused < 290
