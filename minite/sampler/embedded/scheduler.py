"""Which requests run in the next step: continuous batching with reserved memory.

A request is admitted when a place in the batch and KV memory for its whole length (prompt + max_new_tokens) are free;
so a running request is never evicted and there is nothing to recompute. New requests are prefilled together, ahead
of the next decode step of those that run.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from minite.config.schema import ModelConfig, SamplerConfig
from minite.sampler.embedded.kv_cache import Ranges
from minite.sampler.engine import Request
from minite.sampler.limits import check_request


@dataclass(eq=False)
class Sequence:
    """One live request and what has been generated for it."""

    request: Request
    seed: int  # uint64
    start: int = -1  # first slot of its range in the KV cache; token at position p uses slot start + p
    tokens: list[int] = field(default_factory=list)  # response
    logprobs: list[float] = field(default_factory=list)
    finish_reason: str | None = None

    def __post_init__(self) -> None:
        self.prompt_len = len(self.request.prompt_tokens)

    @property
    def length(self) -> int:
        return self.prompt_len + len(self.tokens)

    @property
    def reserved(self) -> int:
        """KV slots it may need. [tokens]"""
        return self.prompt_len + self.request.params.max_new_tokens

    def append(self, token: int, logprob: float) -> None:
        """Add a generated token and decide whether it was the last."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in self.request.params.stop_token_ids:
            self.finish_reason = "stop"
        elif len(self.tokens) == self.request.params.max_new_tokens:
            self.finish_reason = "length"


class Scheduler:
    """The queue, the running batch and the KV ranges they own."""

    def __init__(self, sampler: SamplerConfig, model: ModelConfig, prefill_tokens: int) -> None:
        self.sampler, self.model = sampler, model
        self.prefill_tokens = prefill_tokens  # most tokens prefilled in one step, unless one prompt is longer
        self.ranges = Ranges(sampler.kv_tokens)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []

    def add(self, sequences: list[Sequence]) -> None:
        """Queue requests. All are checked first: when one is impossible, none is queued."""
        live = self.live_ids()
        for sequence in sequences:
            check_request(sequence.request, live, self.model, self.sampler)
            live.add(sequence.request.request_id)
        self.waiting.extend(sequences)

    def admit(self) -> list[Sequence]:
        """Move requests from the queue into the running batch, first come first served; those now need a prefill."""
        admitted: list[Sequence] = []
        tokens = 0
        while self.waiting and len(self.running) < self.sampler.max_batch:
            sequence = self.waiting[0]
            if admitted and tokens + sequence.prompt_len > self.prefill_tokens:
                break
            start = self.ranges.take(sequence.reserved)
            if start is None:
                break
            sequence.start = start
            tokens += sequence.prompt_len
            admitted.append(self.waiting.popleft())
            self.running.append(sequence)
        return admitted

    def retire(self) -> list[Sequence]:
        """Take the finished out of the batch. Their slots stay readable until the next ``admit``."""
        finished = [s for s in self.running if s.finish_reason]
        if finished:
            self.running = [s for s in self.running if not s.finish_reason]
            for sequence in finished:
                self.ranges.give(sequence.start, sequence.reserved)
        return finished

    def abort(self, request_ids: set[str]) -> list[Sequence]:
        """End these requests now, where they stand. Returns those that were live."""
        queued = [s for s in self.waiting if s.request.request_id in request_ids]
        self.waiting = deque(s for s in self.waiting if s.request.request_id not in request_ids)
        for sequence in (*queued, *(s for s in self.running if s.request.request_id in request_ids)):
            sequence.finish_reason = "abort"
        return queued + self.retire()

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.running)

    def live_ids(self) -> set[str]:
        """Ids of all requests that wait or run."""
        return {s.request.request_id for s in (*self.waiting, *self.running)}
