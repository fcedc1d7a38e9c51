"""The protocol every sampler follows: the built-in engine, SGLang, and whatever comes later."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from minite.types import WeightVersion


@dataclass(frozen=True)
class SamplingParams:
    """How to draw tokens. ``temperature`` 0 is greedy. Log-probs are those of the distribution drawn from."""

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 = whole vocabulary
    stop_token_ids: tuple[int, ...] = ()
    seed: int | None = None  # per request: the same seed gives the same tokens whatever shares the batch


@dataclass(frozen=True)
class Request:
    """One prompt to continue. ``request_id`` is the caller's and must be unique among live requests."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams


@dataclass
class Completion:
    """What the engine made of one request."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    tokens: list[int]  # response, the stop token included
    logprobs: list[float]  # by response token [nats]; FP64 values in strict mode
    finish_reason: str  # "stop" | "length" | "abort"
    weight_version: WeightVersion
    routed_experts: Tensor | None = None  # int16 [prompt + response - 1, MoE layers, k]; None for dense models


@dataclass
class EngineStats:
    """Counters since the engine started; gauges now."""

    requests: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    decode_steps: int = 0  # the built-in engine only; SGLang does not tell
    aborted: int = 0
    running: int = 0
    kv_tokens_used: int = 0  # likewise
    weight_updates: int = 0
    update_seconds: dict[str, float] = field(default_factory=dict)  # of the last weight update, by phase


class Engine(Protocol):
    """A sampler. Weight updates are begin -> load* -> finish; between begin and finish nothing is sampled.

    ``finish_update`` recomputes the digest from the tensors that the engine now holds and raises SyncError when it
    differs from ``version.weight_digest`` or when ``version.plan_digest`` is not the engine's own; the engine then
    refuses to generate until a later update succeeds.
    """

    def generate(self, requests: list[Request]) -> list[Completion]: ...  # in request order

    def abort(self, request_ids: Iterable[str] | None = None) -> int: ...  # None = all; number aborted

    def begin_update(self, version: WeightVersion) -> None: ...

    def load_bucket(self, tensors: Mapping[str, Tensor]) -> None: ...  # names as sync.export writes them

    def finish_update(self) -> str: ...  # digest of what is held

    def weight_version(self) -> WeightVersion | None: ...

    def stats(self) -> EngineStats: ...

    def close(self) -> None: ...  # ends what it runs outside of this process; not used afterwards


def update_weights(engine: Engine, buckets: Iterable[Mapping[str, Tensor]], version: WeightVersion) -> str:
    """A whole weight update. Returns the digest of what is held; raises SyncError as the engine does."""
    engine.begin_update(version)
    for bucket in buckets:
        engine.load_bucket(bucket)
    return engine.finish_update()
