"""SGLang's sampler replaced by the built-in one: the same tokens and FP32 log-probs for the same logits and seeds.

SGLang heeds per-request seeds only in its deterministic mode, which it has on some devices only, and its log-probs
come from a softmax of its own. Here a token depends on (seed, position, logits) and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minite.sampler.embedded.sampling import BatchParams, sample
from minite.sampler.sglang import inside


def draw(
    sglangs: Callable[..., Tensor],
    sampler: Any,
    logits_output: Any,
    info: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int],
    token_ids_logprobs: list[Any],
    positions: Tensor,
    **others: Any,
) -> Tensor:
    """Hook around Sampler.forward. Token ids [B]; writes ``logits_output.next_token_logprobs``.

    positions: of the last token so far. Where no miniTE plan is in use, ``sglangs`` own function.
    """
    if inside.current() is None:
        return sglangs(
            sampler, logits_output, info, return_logprob, top_logprobs_nums, token_ids_logprobs, positions, **others
        )
    logits_BV = logits_output.next_token_logits.float()
    uniform_B = uniform(info.sampling_seed, positions.long() + 1)
    token_B, logprob_B = sample(logits_BV, batch_params(info, logits_BV.shape[1]), uniform_B, strict=False)
    logits_output.next_token_logprobs = logprob_B
    return token_B


def batch_params(info: Any, vocab_size: int) -> BatchParams:
    """SGLang's tensors as the built-in sampler's. Greedy is top-k 1 there (engine.py refuses a real top-k 1)."""
    top_k_B = info.top_ks.long()
    greedy_B = top_k_B == 1
    return BatchParams(
        temperature_B=info.temperatures.flatten().double().masked_fill(greedy_B, 0.0),
        top_k_B=top_k_B.masked_fill(greedy_B, vocab_size).clamp(max=vocab_size),
        top_p_B=info.top_ps.double(),
        truncates=info.need_top_p_sampling or info.need_top_k_sampling,
        draws=not info.is_all_greedy,
    )


def add_seeds(info: Any, cls: Any, batch: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after SamplingBatchInfo.from_schedule_batch: seeds of all requests, whatever the mode. int64 [B]."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    info.sampling_seed = torch.tensor([s or 0 for s in seeds], dtype=torch.int64, device=info.temperatures.device)


def _signed(value: int) -> int:
    """The int64 of the same 64 bits."""
    return value - (1 << 64) if value >= 1 << 63 else value


def _shift(x: Tensor, bits: int) -> Tensor:
    """Logical shift to the right."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift(x, 31)


def uniform(seed_B: Tensor, position_B: Tensor) -> Tensor:
    """embedded.sampling.uniform on int64 tensors of any device, bit for bit: float64 [B] in [0, 1).

    Products wrap around, so the bits are those of the uint64 arithmetic there; the host need not wait for the device.
    """
    golden = _signed(0x9E3779B97F4A7C15)
    bits = _mix(_mix(seed_B + golden) + (position_B + 1) * golden)
    return _shift(bits, 12).double() * 2.0**-52
