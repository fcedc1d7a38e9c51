"""Responses -> packed microbatches, the same plan on every rank. No megatron here.

A microbatch is a run of whole responses end to end, padded to a multiple of the tensor-parallel size (sequence
parallelism splits it evenly). Padding is a sequence of its own at the end, so it cannot touch a real token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from minite.errors import UserError
from minite.types import RolloutBatch


@dataclass(frozen=True)
class Microbatch:
    """What one forward pass reads. T counts padding; values at padding are 0, False or -1."""

    tokens_T: Tensor  # int64
    cu_seqlens: Tensor  # int64, offsets of the responses and, last, of the padding
    position_T: Tensor  # int64, position within the response
    source_n: Tensor  # int64, on the CPU: where in the batch the first n tokens came from; the other T - n are padding
    replay_TLk: Tensor | None  # int16, experts to use by token and MoE layer; -1 = route freely

    def take(self, x_T: Tensor) -> Tensor:
        """A per-token tensor of the batch [batch tokens, ...] -> [T, ...] on this microbatch's device, 0 at padding."""
        own = x_T[self.source_n]
        padding = own.new_zeros(len(self.tokens_T) - len(own), *own.shape[1:])
        return torch.cat([own, padding]).to(self.tokens_T.device, non_blocking=True)

    @property
    def first_T(self) -> Tensor:
        """True at the first token of each response: nothing predicts it. bool [T]."""
        return self.position_T == 0


def plan_microbatches(lengths: Sequence[int], limit: int, ranks: int) -> list[list[list[int]]]:
    """Which responses go into which microbatch of which rank: plan[microbatch][rank] = response indices.

    Responses are dealt longest first to the bin with the fewest tokens, over the smallest number of bins (a multiple
    of ``ranks``) that keeps every bin within ``limit`` tokens. Every rank gets equally many microbatches, because
    their forward passes meet in collectives; some may be empty. Depends on the arguments only.
    """
    if max(lengths, default=0) > limit:
        raise UserError(
            f"learner.tokens_per_microbatch is {limit}, but a response with its prompt has {max(lengths)} tokens and "
            f"responses are never cut: raise it to at least {max(lengths)} or lower sampler.max_new_tokens"
        )
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    rounds = max(1, -(-sum(lengths) // (limit * ranks)))
    while True:
        bins: list[list[int]] = [[] for _ in range(rounds * ranks)]
        sizes = [0] * len(bins)
        for i in order:
            target = sizes.index(min(sizes))
            bins[target].append(i)
            sizes[target] += lengths[i]
        if max(sizes) <= limit:
            return [[sorted(b) for b in bins[r * ranks : (r + 1) * ranks]] for r in range(rounds)]
        rounds += 1


def pack(
    batch: RolloutBatch, responses: Sequence[int], multiple: int, replay: bool, device: torch.device
) -> Microbatch:
    """The given responses of ``batch``, in the given order, on ``device``. No responses give one row of padding."""
    cu = batch.cu_seqlens_S1.tolist()
    source_n = torch.cat([torch.arange(cu[i], cu[i + 1]) for i in responses] or [torch.zeros(0, dtype=torch.int64)])
    lengths = [cu[i + 1] - cu[i] for i in responses]
    padding = -len(source_n) % multiple or (0 if lengths else multiple)
    offsets = torch.tensor([0, *lengths, padding] if padding else [0, *lengths]).cumsum(0)

    def padded(x: Tensor, value: int) -> Tensor:
        return torch.cat([x[source_n], x.new_full((padding, *x.shape[1:]), value)]).to(device, non_blocking=True)

    return Microbatch(
        tokens_T=padded(batch.tokens_T, 0),
        cu_seqlens=offsets.to(device),
        position_T=torch.cat([torch.arange(n) for n in [*lengths, padding]]).to(device),
        source_n=source_n,
        replay_TLk=padded(batch.routed_experts_TLk, -1) if replay and batch.routed_experts_TLk is not None else None,
    )
