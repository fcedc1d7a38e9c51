"""Prompts: tasks that make or read examples, the split by hash, and the endless stream of prompts.

A new task is one function and one row of TASKS.
"""

from __future__ import annotations

import itertools
import json
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from minite.config import RunConfig
from minite.config.build import nearest
from minite.config.schema import DataConfig
from minite.driver import reasoning
from minite.driver.tokenizer import Tokenizer
from minite.errors import UserError

OPERATIONS: dict[str, Callable[[int, int], int]] = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_EXPECTED = '{"prompt": "...", "answer": "..."}'
MAX_LINE = 16 << 20  # of a JSON-lines file [bytes]; no model has room for such a prompt
MAX_QUESTIONS = 1 << 18  # arithmetic holds all its questions in memory


@dataclass(frozen=True)
class Example:
    """One question. Examples of one ``key`` fall on the same side of the split: 3+5 and 5+3 are no two questions."""

    prompt: str
    answer: str
    key: str
    wrong: str | None = None  # a plausible wrong answer, for imperfect demonstrations
    entry: reasoning.Entry | None = field(default=None, compare=False)  # what a task's own scorer reads


@dataclass(frozen=True)
class Prompt:
    """An example in its turn. ``id`` is unique in a run and grows: the stream's position."""

    id: int
    example: Example
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Task:
    """All examples of a run, split; no key is on both sides."""

    train: tuple[Example, ...]
    heldout: tuple[Example, ...]


def arithmetic(data: DataConfig) -> list[Example]:
    """Every "a+b=" with 0 <= a, b <= max_operand, for each operation; the answer is the number in decimal."""
    numbers = range(data.max_operand + 1)
    count = len(numbers) ** 2 * len(data.operations)
    if count > MAX_QUESTIONS:
        raise UserError(
            f"data.max_operand: {data.max_operand} with {len(data.operations)} operation(s) makes {count} questions, "
            f"at most {MAX_QUESTIONS} fit; lower it"
        )
    examples = []
    for op, a, b in itertools.product(data.operations, numbers, numbers):
        low, high = (a, b) if op == "-" else (min(a, b), max(a, b))
        value = OPERATIONS[op](a, b)
        examples.append(Example(f"{a}{op}{b}=", str(value), f"{low}{op}{high}", str(value + 1)))
    return examples


def modular(data: DataConfig) -> list[Example]:
    """Every "a+b=" modulo max_operand + 1, all numbers equally wide, the answer written units first.

    Units first because a carry then only depends on what is already written: a tiny model learns it in minutes.
    """
    modulus = data.max_operand + 1
    if modulus**2 > MAX_QUESTIONS:
        raise UserError(
            f"data.max_operand: {data.max_operand} makes {modulus**2} questions, at most {MAX_QUESTIONS} fit; lower it"
        )
    width = len(str(data.max_operand))

    def written(value: int) -> str:
        return f"{value % modulus:0{width}}"[::-1]

    return [
        Example(f"{a:0{width}}+{b:0{width}}=", written(a + b), f"{min(a, b)}+{max(a, b)}", written(a + b + 1))
        for a, b in itertools.product(range(modulus), repeat=2)
    ]


def jsonl(data: DataConfig) -> list[Example]:
    """Lines {"prompt": str, "answer": str} of data.path; other keys are ignored, blank lines skipped."""
    path = Path(data.path or "")
    if not path.is_file():
        files = [p.name for p in path.parent.iterdir() if p.is_file()] if path.parent.is_dir() else []
        what = "is a directory" if path.is_dir() else "does not exist"
        raise UserError(f"data.path: {path} {what}; expected a JSON-lines file; {nearest(path.name, sorted(files))}")
    try:
        examples = [_parse_line(line, f"{path}:{i}") for i, line in enumerate(_lines(path), 1) if line.strip()]
    except OSError as error:
        raise UserError(f"data.path: {path} cannot be read: {error}") from None
    if not examples:
        raise UserError(f"data.path: {path} is empty; expected lines {_EXPECTED}")
    return examples


def _lines(path: Path) -> Iterator[bytes]:
    """Cut at newlines only; text would also be cut at U+2028. One line at a time is held."""
    with path.open("rb") as file:
        for number in itertools.count(1):
            line = file.readline(MAX_LINE + 1)
            if len(line) > MAX_LINE:
                raise UserError(f"{path}:{number}: a line of more than {MAX_LINE >> 20} MiB; expected {_EXPECTED}")
            if not line:
                return
            yield line


def _parse_line(line: bytes, where: str) -> Example:
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 ({error.reason} at byte {error.start}); expected {_EXPECTED}") from None
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and lists in lists in lists
        what = "nested too deep" if isinstance(error, RecursionError) else error
        raise UserError(f"{where}: not JSON ({what}); expected {_EXPECTED}") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: got {_shown(record)}; expected {_EXPECTED}")
    for key in ("prompt", "answer"):
        if key not in record:
            raise UserError(f"{where}: no key '{key}' among {_shown(list(record))}")
        if not isinstance(record[key], str) or not record[key]:
            raise UserError(f"{where}: '{key}' is {_shown(record[key])}; expected text of at least one character")
        if any("\ud800" <= character <= "\udfff" for character in record[key]):  # JSON can write it, UTF-8 cannot
            raise UserError(f"{where}: '{key}' has half of a surrogate pair: {_shown(record[key])}; expected text")
    return Example(record["prompt"], record["answer"], record["prompt"])


def _shown(value: Any) -> str:
    """As much of a value as a line has room for."""
    text = ascii(value)
    return text if len(text) <= 60 else text[:57] + "..."


def reasoning_gym(data: DataConfig) -> list[Example]:
    """Questions that the tasks of ``data.tasks`` make, each with an answer that they give full marks."""
    return [Example(e["question"], str(e["answer"]), e["question"], entry=e) for e in reasoning.questions(data)]


TASKS: dict[str, Callable[[DataConfig], list[Example]]] = {
    "arithmetic": arithmetic,
    "modular": modular,
    "jsonl": jsonl,
    "reasoning_gym": reasoning_gym,
}


def load_task(config: RunConfig, tokenizer: Tokenizer) -> Task:
    """The recipe's examples, split by the seed. Raises UserError for a prompt that the model has no room for."""
    task = split(TASKS[config.data.kind](config.data), config.data.heldout, config.seed)
    room = config.model.max_seq_len - config.sampler.max_new_tokens
    for example in task.train + task.heldout:
        length = len(tokenizer.encode_prompt(example.prompt))
        if length > room:
            raise UserError(
                f"data: prompt {example.prompt[:40]!r} has {length} tokens, at most {room} fit beside "
                "sampler.max_new_tokens in model.max_seq_len; shorten it or change one of the two"
            )
    return task


def split(examples: Sequence[Example], heldout: int, seed: int) -> Task:
    """Hold out the ``heldout`` examples whose keys hash lowest under the seed: independent of the order in the file.

    Examples that share a held-out key but exceed the number are used on neither side.
    """
    ranked = sorted(examples, key=lambda e: (_hash(seed, "split", e.key), e.prompt, e.answer))
    held = tuple(ranked[:heldout])
    held_keys = {e.key for e in held}
    train = tuple(e for e in ranked if e.key not in held_keys)
    if not train:
        raise UserError(f"data.heldout: {heldout} of {len(examples)} examples leave none to train on; lower it")
    return Task(train, held)


def score(example: Example, response: str) -> float:
    """The reward of a response that has ended."""
    return reward(response, example.answer) if example.entry is None else reasoning.score(example.entry, response)


def reward(text: str, answer: str) -> float:
    """1 when the response is the answer, surrounding blanks aside, else 0."""
    return float(text.strip() == answer.strip())


class PromptStream:
    """Endless epochs over the examples, each in an order of its own that only the seed and the epoch decide."""

    def __init__(self, examples: Sequence[Example], tokenizer: Tokenizer, seed: int) -> None:
        self._examples = list(examples)
        self._tokenizer = tokenizer
        self._seed = seed
        self._position = 0  # prompts handed out so far
        self._order: list[int] = []
        self._order_epoch = -1

    def take(self, count: int) -> list[Prompt]:
        """The next ``count`` prompts."""
        prompts = [self._at(self._position + i) for i in range(count)]
        self._position += count
        return prompts

    def _at(self, position: int) -> Prompt:
        epoch, index = divmod(position, len(self._examples))
        if epoch != self._order_epoch:
            self._order = sorted(range(len(self._examples)), key=lambda i: _hash(self._seed, f"epoch {epoch}", str(i)))
            self._order_epoch = epoch
        example = self._examples[self._order[index]]
        return Prompt(position, example, tuple(self._tokenizer.encode_prompt(example.prompt)))

    def state_dict(self) -> dict[str, Any]:
        epoch, position = divmod(self._position, len(self._examples))
        return {"epoch": epoch, "position": position, "fingerprint": self._fingerprint()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Raises UserError when the examples or the seed are not those of the saved stream."""
        if state["fingerprint"] != self._fingerprint():
            raise UserError(
                "data: the examples or the seed differ from those of the checkpoint, so the run cannot go on exactly; "
                "restore the data file and the data section, or start a new run"
            )
        self._position = state["epoch"] * len(self._examples) + state["position"]

    def _fingerprint(self) -> str:
        digest = blake2b(str(self._seed).encode(), digest_size=16)
        for example in self._examples:
            digest.update(repr((example.prompt, example.answer)).encode())
        return digest.hexdigest()


def _hash(seed: int, purpose: str, text: str) -> bytes:
    """Unlike a library's shuffle, the same on every machine and in every version."""
    return blake2b(f"{seed}|{purpose}|{text}".encode(), digest_size=8).digest()
