"""Text to tokens and back: a built-in alphabet for the tiny recipes, or a Hugging Face tokenizer directory."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from minite.config import RunConfig
from minite.errors import UserError

# 30 characters; with pad and eos a vocabulary of 32, which divides by the block size of every format.
ALPHABET = "0123456789+-*/= ()<>.,:;?!%^_x"


class Tokenizer(Protocol):
    """``decode`` leaves special tokens out; ``vocab_size`` counts every id that ``encode`` can return."""

    vocab_size: int
    eos_id: int
    pad_id: int

    def encode(self, text: str) -> list[int]: ...

    def encode_prompt(self, text: str) -> list[int]: ...  # the text, or with data.chat_template a chat that asks it

    def decode(self, tokens: Sequence[int]) -> str: ...


class CharTokenizer:
    """One token per character of ALPHABET; id 0 pads, id 1 ends a response."""

    pad_id = 0
    eos_id = 1
    vocab_size = len(ALPHABET) + 2

    def __init__(self) -> None:
        self._id_of = {char: i + 2 for i, char in enumerate(ALPHABET)}

    def encode(self, text: str) -> list[int]:
        """Raises UserError naming the first character that the alphabet lacks."""
        try:
            return [self._id_of[char] for char in text]
        except KeyError as error:
            raise UserError(
                f"data.tokenizer chars: {text[:60]!r} has {error.args[0]!r}, which is not one of {ALPHABET!r}; "
                "set data.tokenizer to a Hugging Face tokenizer directory"
            ) from None

    encode_prompt = encode  # it has no chat template

    def decode(self, tokens: Sequence[int]) -> str:
        """Ids outside the alphabet (a model's vocabulary may be padded) become U+FFFD, which no answer contains."""
        chars = (ALPHABET[t - 2] if t - 2 < len(ALPHABET) else "\N{REPLACEMENT CHARACTER}" for t in tokens if t >= 2)
        return "".join(chars)


class HuggingFaceTokenizer:
    """A tokenizer directory read by transformers, without network access. ``chat``: prompts go into its template."""

    def __init__(self, directory: Path, chat: bool = False) -> None:
        if not directory.is_dir():
            raise UserError(
                f"data.tokenizer: {directory} is not a directory; expected 'chars' or a directory with tokenizer.json"
            )
        self._inner = _load_auto_tokenizer(directory)
        if self._inner.eos_token_id is None:
            raise UserError(f"data.tokenizer: {directory} names no eos_token; add it to tokenizer_config.json")
        if chat and not self._inner.chat_template:
            raise UserError(f"data.chat_template: {directory} has no chat template; remove it or add the template")
        self._chat = chat
        self.vocab_size = len(self._inner)
        self.eos_id = int(self._inner.eos_token_id)
        pad = self._inner.pad_token_id
        self.pad_id = self.eos_id if pad is None else int(pad)

    def encode(self, text: str) -> list[int]:
        # verbose would warn of texts longer than the model's context, which nobody feeds to it in one piece
        return list(self._inner.encode(text, add_special_tokens=False, verbose=False))

    def encode_prompt(self, text: str) -> list[int]:
        if not self._chat:
            return self.encode(text)
        message = [{"role": "user", "content": text}]
        # As text first: the template writes its special tokens itself.
        return self.encode(self._inner.apply_chat_template(message, tokenize=False, add_generation_prompt=True))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self._inner.decode(list(tokens), skip_special_tokens=True))


def _load_auto_tokenizer(directory: Path) -> Any:
    try:
        from transformers import AutoTokenizer  # only recipes with such a tokenizer need it
    except ModuleNotFoundError:
        raise UserError("data.tokenizer: needs the transformers package; run pip install 'minite[hf]'") from None
    try:
        return AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
    except (OSError, ValueError) as error:
        first_line = str(error).splitlines()[0]
        raise UserError(f"data.tokenizer: transformers cannot read {directory}: {first_line}") from None


def make_tokenizer(config: RunConfig) -> Tokenizer:
    """The recipe's tokenizer. Raises UserError when the model's vocabulary cannot hold it."""
    choice = config.data.tokenizer
    tokenizer: Tokenizer = (
        CharTokenizer() if choice == "chars" else HuggingFaceTokenizer(Path(choice), config.data.chat_template)
    )
    if tokenizer.vocab_size > config.model.vocab_size:
        raise UserError(
            f"{config.where('model.vocab_size')}: model.vocab_size is {config.model.vocab_size}, expected at least "
            f"{tokenizer.vocab_size} for tokenizer {choice}; raise it or change data.tokenizer"
        )
    return tokenizer
