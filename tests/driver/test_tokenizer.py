"""The built-in alphabet and Hugging Face directories."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from minite.config.schema import DataConfig, ModelConfig, RunConfig
from minite.driver.tokenizer import ALPHABET, CharTokenizer, make_tokenizer
from minite.errors import UserError

CONFIG = RunConfig("test", ModelConfig("qwen3", 1, 16, 1, 1, 16, vocab_size=32, intermediate_size=32))


def test_chars_round_trip() -> None:
    tokenizer, rng = CharTokenizer(), random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(ALPHABET, k=rng.randrange(20)))
        tokens = tokenizer.encode(text)
        assert all(2 <= t < tokenizer.vocab_size for t in tokens)
        assert tokenizer.decode([0, *tokens, 1, 0]) == text


def test_chars_vocabulary_divides_by_the_block_size() -> None:
    assert CharTokenizer.vocab_size % 16 == 0
    assert len(set(ALPHABET)) == len(ALPHABET)


def test_ids_of_a_padded_vocabulary_never_look_like_an_answer() -> None:
    assert CharTokenizer().decode([11, 40, 3]) == "9\N{REPLACEMENT CHARACTER}1"


def test_unknown_character_is_named() -> None:
    with pytest.raises(UserError, match="'12 apples' has 'a', which is not one of"):
        CharTokenizer().encode("12 apples")


def test_vocabulary_of_the_model_must_hold_the_tokenizer() -> None:
    assert make_tokenizer(CONFIG).vocab_size == 32
    small = replace(CONFIG, model=replace(CONFIG.model, vocab_size=16))
    with pytest.raises(UserError, match=r"model.vocab_size is 16, expected at least 32"):
        make_tokenizer(small)


def hugging_face(path: Path) -> RunConfig:
    return replace(CONFIG, data=DataConfig(tokenizer=str(path)))


def test_hugging_face_directory(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="needs the extra hf")
    transformers = pytest.importorskip("transformers", reason="needs the extra hf")
    vocab = {"<pad>": 0, "<end>": 1, "two": 2, "plus": 3, "three": 4}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="<pad>"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<end>", pad_token="<pad>")
    fast.save_pretrained(tmp_path)

    tokenizer = make_tokenizer(hugging_face(tmp_path))
    assert (tokenizer.vocab_size, tokenizer.pad_id, tokenizer.eos_id) == (5, 0, 1)
    assert tokenizer.encode("two plus three") == [2, 3, 4]
    assert tokenizer.decode([2, 3, 4, 1]) == "two plus three"
    assert tokenizer.encode_prompt("two plus three") == [2, 3, 4]
    chat = replace(CONFIG, data=DataConfig(tokenizer=str(tmp_path), chat_template=True))
    with pytest.raises(UserError, match="data.chat_template: .* has no chat template; remove it or"):
        make_tokenizer(chat)

    fast.chat_template = "{% for m in messages %}three {{ m.content }} <end> {% endfor %}two"
    fast.save_pretrained(tmp_path)
    assert make_tokenizer(chat).encode_prompt("two plus three") == [4, 2, 3, 4, 1, 2]


def test_bad_hugging_face_directories_are_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nowhere is not a directory; expected 'chars'"):
        make_tokenizer(hugging_face(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="transformers cannot read .*empty"):
        make_tokenizer(hugging_face(tmp_path / "empty"))
