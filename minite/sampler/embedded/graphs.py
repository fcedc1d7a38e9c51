"""Decode steps as CUDA graphs: one launch a step instead of several hundred.

A graph is captured for a size of batch when it is first needed, and replayed with fewer requests by padding: rows of a
padded step are computed for a spare slot of the cache, and since no kernel's row depends on the rows beside it, the
others have the bits of a step without graphs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from minite.sampler.embedded.kv_cache import Decode, KVCache
from minite.sampler.embedded.model import Model


def sizes(max_batch: int) -> list[int]:
    """Sizes that graphs are captured for: padding costs a third of a step at most, and little below 8."""
    ladder = {1, 2, 4, 8, *(step * 2**power for power in range(3, max(4, max_batch.bit_length())) for step in (2, 3))}
    return sorted({*(size for size in ladder if size < max_batch), max_batch})


@dataclass(frozen=True)
class Captured:
    """A step of one size."""

    graph: torch.cuda.CUDAGraph
    logits_BV: Tensor  # overwritten by the next step


class DecodeGraphs:
    """The decode steps of one engine on a CUDA device. They read weights where they lie: see ``Model.prepare``."""

    def __init__(self, model: Model, cache: KVCache, scale: float, max_batch: int) -> None:
        self.model, self.cache, self.scale = model, cache, scale
        self.sizes = sizes(max_batch)
        self._inputs_3B = torch.zeros(3, max_batch, dtype=torch.int64, device=cache.experts.device)  # see _step
        self.held: dict[int, Captured] = {}
        self._pool: tuple[int, int] | None = None
        self._addresses: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Device memory held by the graphs: activations, which they share, and the logits of each."""
        segments = torch.cuda.memory_snapshot()
        return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == self._pool)

    def decode(self, tokens: list[int], lengths: list[int], slots: list[int]) -> Tensor:
        """One token more: logits [B, V] after the last token of each sequence, valid until the next call.

        tokens: the last of each sequence; lengths with it; slots: where its key and value go.
        """
        batch = len(tokens)
        size = next(size for size in self.sizes if size >= batch)
        padding = size - batch
        rows = (tokens + [0] * padding, lengths + [1] * padding, slots + [self.cache.slots] * padding)
        self._inputs_3B[:, :size].copy_(torch.tensor(rows))
        captured = self.captured(size)
        captured.graph.replay()
        return captured.logits_BV[:batch]

    def captured(self, size: int) -> Captured:
        """The step of one of ``sizes``, for the weights as they lie now."""
        if self._addresses != self.model.addresses:  # weights lie elsewhere than when these were captured
            self.held.clear()
            self._pool, self._addresses = None, self.model.addresses
        if size not in self.held:
            self.held[size] = self._capture(size)
        return self.held[size]

    def _capture(self, size: int) -> Captured:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._step(size)  # compiles and loads kernels, which must not happen within a capture
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        # thread_local: other threads of the process may go on using the device
        with torch.cuda.graph(graph, pool=self._pool, stream=stream, capture_error_mode="thread_local"):
            logits_BV = self._step(size)
        self._pool = graph.pool()
        return Captured(graph, logits_BV)

    def _step(self, size: int) -> Tensor:
        token_B, length_B, slot_B = self._inputs_3B[:, :size].unbind()
        attend = Decode(self.cache, slot_B, None, length_B, self.scale, self.model.strict, self.model.fused)
        logits_BV, expert_BLk = self.model.forward(token_B, length_B - 1, attend, None)
        if expert_BLk is not None:
            self.cache.experts[slot_B] = expert_BLk
        return logits_BV
