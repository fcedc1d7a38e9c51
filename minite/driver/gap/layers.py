"""`minite gap --layers`: both engines on the same tokens, each batched its own way, watched operation by operation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from minite.config import RunConfig
from minite.diagnostics.layerwise import LayerReport, Observed, compare
from minite.driver.gap.local import Pair, pair
from minite.driver.gap.measure import rollout
from minite.driver.gap.subject import Note, Subject
from minite.driver.gap.trace import Pass, Rows, assemble
from minite.errors import UserError
from minite.sampler.embedded import EmbeddedEngine
from minite.sampler.embedded.watch import watched
from minite.sampler.engine import Request
from minite.types import RolloutBatch

if TYPE_CHECKING:
    from minite.sampler.sglang.engine import SglangEngine
    from minite.sampler.sglang.watching import RequestPass

RESPONSES = 16  # at most: everything that passes through every operation is kept


def examine_layers(subject: Subject, note: Note) -> LayerReport:
    """Compare the engines on the first responses of a subject."""
    note("layers: watching both engines")
    with pair(subject.config, subject.plan) as engines:
        subject.load(engines.worker)
        engines.sync()
        batch, theirs = watch_sampler(engines, subject)
        ours = watch_learner(engines, subject, batch)
    return compare(ours, theirs, batch.cu_seqlens_S1)


def watch_sampler(engines: Pair, subject: Subject) -> tuple[RolloutBatch, list[Observed]]:
    """Sample as a rollout does. Returns the batch and what each operation did to its tokens."""
    config = subject.config
    kept: list[Request] = []

    def keep(asked: Sequence[Request]) -> list[Request]:
        kept.extend(first_fit(asked, config))
        return kept

    def sample() -> RolloutBatch:
        return rollout(engines, config, subject.plan, subject.prompts, subject.stop_token, keep)

    if isinstance(engines.engine, EmbeddedEngine):
        with watched(engines.engine) as passes:
            batch = sample()
        token_of = slot_tokens(batch, config.sampler.max_new_tokens)
        placed = [Pass(Rows(token_of[p.slot_N], p.row_N, p.last_B), p.calls) for p in passes]
    else:
        with cast("SglangEngine", engines.engine).watched() as seen:
            batch = sample()
        first = dict(zip([r.request_id for r in kept], batch.cu_seqlens_S1.tolist(), strict=False))
        length = dict(zip(first, batch.cu_seqlens_S1.diff().tolist(), strict=True))
        placed = [Pass(request_rows(p, first, length), p.calls) for p in seen]
    return batch, assemble(placed, config.model, batch.num_tokens, megatron=False)


def request_rows(seen: RequestPass, first: Mapping[str, int], length: Mapping[str, int]) -> Rows:
    """The tokens of SGLang's rows. ``first``: token where a request begins in the batch; ``length``: its tokens.

    SGLang may compute a step more than a response has tokens: that is nobody's.
    """
    first_N = torch.tensor([first[r] for r in seen.request_ids])[seen.request_N]
    length_N = torch.tensor([length[r] for r in seen.request_ids])[seen.request_N]
    row_N = (seen.position_N < length_N).nonzero().squeeze(-1)
    return Rows((first_N + seen.position_N)[row_N], row_N, seen.last_B)


def watch_learner(engines: Pair, subject: Subject, batch: RolloutBatch) -> list[Observed]:
    """The learner's log-probs of the batch, one microbatch, and what each operation did to its tokens."""
    token_T = torch.arange(batch.num_tokens)
    done = Pass(Rows(token_T, token_T))
    with engines.worker.watched(done.calls.append):
        engines.worker.logprobs(batch)
    return assemble([done], subject.config.model, batch.num_tokens, megatron=True)


def first_fit(asked: Sequence[Request], config: RunConfig) -> list[Request]:
    """As many requests as run at once: then each keeps its KV slots, and the learner takes all in one microbatch."""
    limit = min(config.sampler.kv_tokens, config.learner.tokens_per_microbatch)
    kept: list[Request] = []
    tokens = 0
    for request in asked[: min(RESPONSES, config.sampler.max_batch)]:
        tokens += len(request.prompt_tokens) + request.params.max_new_tokens
        if tokens > limit:
            break
        kept.append(request)
    if not kept:
        raise UserError(
            f"--layers: one response with its prompt may have {tokens} tokens, more than sampler.kv_tokens or "
            f"learner.tokens_per_microbatch ({limit}); raise them or lower sampler.max_new_tokens"
        )
    return kept


def slot_tokens(batch: RolloutBatch, max_new_tokens: int) -> Tensor:
    """int64 [slots]: the token of the batch in each KV slot, -1 where there is none.

    In an idle cache requests get ranges for prompt and ``max_new_tokens`` end to end, in their order.
    """
    tokens: list[int] = []
    offsets = batch.cu_seqlens_S1.tolist()
    for start, end in zip(offsets, offsets[1:], strict=False):
        spare = max_new_tokens - int(batch.loss_mask_T[start:end].sum())
        tokens += [*range(start, end), *[-1] * spare]
    return torch.tensor(tokens)
