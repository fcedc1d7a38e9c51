"""A checkpoint under one plan, ready to be asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from minite.backends.device import use_cuda
from minite.config import RunConfig, resolve_plan
from minite.driver.tokenizer import Tokenizer, make_tokenizer
from minite.learner import hf
from minite.models import get_model
from minite.sampler.embedded import EmbeddedEngine
from minite.sampler.engine import Completion, Request, SamplingParams, update_weights
from minite.sync.export import pack
from minite.sync.stored import MODEL_DTYPES
from minite.sync.transport import package


@dataclass(frozen=True)
class Subject:
    """What a task examines."""

    config: RunConfig
    engine: EmbeddedEngine
    tokenizer: Tokenizer

    @property
    def room(self) -> int:
        """The longest sequence that the model takes. [tokens]"""
        return self.config.model.max_seq_len

    def logprobs(self, sequences: list[list[int]]) -> Iterator[list[float]]:
        """Of every token but the first of each sequence. [nats]"""
        return (scores_T.tolist() for scores_T in self.engine.logprobs(sequences))

    def complete(self, prompts: Sequence[str], max_new_tokens: int) -> list[Completion]:
        """The most likely response to each prompt, in the order of the prompts."""
        return self.continuations([self.tokenizer.encode_prompt(prompt) for prompt in prompts], max_new_tokens)

    def continuations(self, sequences: Sequence[Sequence[int]], max_new_tokens: int) -> list[Completion]:
        """The most likely tokens after each sequence, in the order of the sequences."""
        params = SamplingParams(max_new_tokens, temperature=0.0, stop_token_ids=(self.tokenizer.eos_id,))
        return self.engine.generate([Request(str(i), tuple(tokens), params) for i, tokens in enumerate(sequences)])

    def greedy(self, prompts: Sequence[str], max_new_tokens: int) -> list[list[int]]:
        """The tokens of `complete`, the end of the response left out."""
        eos = self.tokenizer.eos_id
        return [[token for token in done.tokens if token != eos] for done in self.complete(prompts, max_new_tokens)]


def load(checkpoint: Path, config: RunConfig) -> Subject:
    """The weights of a BF16 or FP32 Hugging Face directory, quantized by the recipe's plan, in the built-in engine.

    Raises UserError for a directory that does not hold the recipe's model, and for a tokenizer that is missing.
    """
    tokenizer, plan = make_tokenizer(config), resolve_plan(config)
    read, dtype = hf.reader(checkpoint, config), MODEL_DTYPES[config.model.dtype]
    shapes = get_model(config.model.kind).hf_tensors(config.model)
    engine = EmbeddedEngine(config, plan, "cuda" if use_cuda(config, "sampler") else "cpu")
    named = ((name, read(name, shape).to(engine.device, dtype)) for name, shape in shapes.items())
    buckets, version = package(pack(plan, named, engine.model.backend, shapes=shapes), 0, plan.digest)
    update_weights(engine, buckets, version)
    return Subject(config, engine, tokenizer)
