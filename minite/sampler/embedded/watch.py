"""The built-in engine watched operation by operation, for comparisons with a learner."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from minite.backends.recording import GemmCall, OpCall, RecordingGemms
from minite.layers.recording import recorded
from minite.sampler.embedded.engine import EmbeddedEngine
from minite.sampler.embedded.kv_cache import Decode, Prefill


@dataclass
class SlotPass:
    """One forward pass: what it called, and the KV slot of each row. With equal prompts a row has several slots."""

    slot_N: Tensor  # int64
    row_N: Tensor  # int64: the row whose keys went to that slot
    last_B: Tensor | None  # rows that reached the final norm; None = all
    calls: list[OpCall | GemmCall] = field(default_factory=list)


@contextmanager
def watched(engine: EmbeddedEngine) -> Iterator[list[SlotPass]]:
    """Within the block ``generate`` computes step by step, without fused kernels, and leaves its passes in the list."""
    model = engine.model
    backend, fused, forward = model.backend, model.fused, model.forward
    passes: list[SlotPass] = []

    def noting(token_T: Tensor, position_T: Tensor, attend: Any, last_B: Tensor | None) -> Any:
        passes.append(_pass_of(attend, last_B))
        return forward(token_T, position_T, attend, last_B)

    model.backend, model.fused = RecordingGemms(backend, lambda call: passes[-1].calls.append(call)), None
    model.prepare()  # a backend multiplies with weights that it prepared itself
    model.forward = noting  # type: ignore[method-assign]
    try:
        with recorded(lambda call: passes[-1].calls.append(call)):
            yield passes
    finally:
        model.backend, model.fused = backend, fused
        model.forward = forward  # type: ignore[method-assign]
        model.prepare()


def _pass_of(attend: Prefill | Decode, last_B: Tensor | None) -> SlotPass:
    if isinstance(attend, Prefill):
        return SlotPass(attend.slot_N.cpu(), attend.source_N.cpu(), None if last_B is None else last_B.cpu())
    return SlotPass(attend.slot_B.cpu(), torch.arange(len(attend.slot_B)), None)
