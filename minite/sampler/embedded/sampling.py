"""Drawing tokens: temperature, top-k, top-p, and randomness that depends on nothing but (seed, position).

A request's uniforms are a hash of its seed and of the position being filled, so the tokens it gets do not depend on
what shares its batch, on scheduling, or on how often the engine was called before.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from minite.layers import ops
from minite.sampler.engine import SamplingParams

_PIECE = 256  # of the vocabulary [tokens], see _invert


@dataclass(frozen=True)
class BatchParams:
    """``SamplingParams`` of the B requests of a batch as tensors."""

    temperature_B: Tensor  # float64; 0 = greedy
    top_k_B: Tensor  # int64; vocabulary size = off
    top_p_B: Tensor  # float64
    truncates: bool  # any request uses top-k or top-p
    draws: bool  # any request is not greedy
    greedy: bool = True  # any may be
    plain: bool = False  # all that draw are known to do so at temperature 1

    @classmethod
    def of(cls, params: list[SamplingParams], vocab_size: int, device: torch.device) -> BatchParams:
        top_k = [min(p.top_k, vocab_size) if p.top_k else vocab_size for p in params]
        return cls(
            torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device),
            torch.tensor(top_k, dtype=torch.int64, device=device),
            torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
            truncates=any(k < vocab_size or p.top_p < 1 for k, p in zip(top_k, params, strict=True)),
            draws=any(p.temperature > 0 for p in params),
            greedy=any(p.temperature == 0 for p in params),
            plain=all(p.temperature in (0, 1) for p in params),
        )


def _mix(x: np.ndarray) -> np.ndarray:
    """Finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a bijection of uint64 that spreads every bit over all."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def uniform(seed_B: np.ndarray, position_B: np.ndarray) -> np.ndarray:
    """Uniforms in [0, 1) with 52 bits, a pure function of (seed, position): float64 [B] from two uint64 [B].

    SplitMix64's stream number ``position`` of the generator seeded by ``mix(seed)``; the seed is mixed first so that
    neighbouring seeds do not give shifted copies of one stream.
    """
    golden = np.uint64(0x9E3779B97F4A7C15)
    with np.errstate(over="ignore"):
        bits = _mix(_mix(seed_B + golden) + (position_B + np.uint64(1)) * golden)
    return (bits >> np.uint64(12)).astype(np.float64) * 2.0**-52


def request_seed(run_seed: int, request_id: str) -> int:
    """Seed of a request that brought none: a hash, so that a resumed run does not depend on counters. uint64."""
    return int.from_bytes(hashlib.blake2b(f"{run_seed}/{request_id}".encode(), digest_size=8).digest(), "big")


def truncate(logprob_BV: Tensor, params: BatchParams) -> Tensor:
    """Log-probs with -inf outside the top-k and outside the nucleus (top-p), not renormalised.

    Top-p keeps the smallest set of most likely tokens whose probability reaches ``top_p`` (Holtzman et al., 2020),
    always at least one; it is computed on the distribution that top-k leaves. Ties keep the lower token id.
    """
    sorted_BV, order_BV = logprob_BV.sort(dim=-1, descending=True, stable=True)
    rank_V = torch.arange(logprob_BV.shape[1], device=logprob_BV.device)
    sorted_BV = sorted_BV.masked_fill(rank_V >= params.top_k_B[:, None], -torch.inf)
    prob_BV = sorted_BV.double().softmax(-1)
    before_BV = prob_BV.cumsum(-1) - prob_BV  # probability of all tokens ahead in rank
    drop_BV = (before_BV >= params.top_p_B[:, None]) & (rank_V > 0) & (params.top_p_B[:, None] < 1)
    sorted_BV = sorted_BV.masked_fill(drop_BV, -torch.inf)
    return torch.empty_like(logprob_BV).scatter_(-1, order_BV, sorted_BV)


def sample(logits_BV: Tensor, params: BatchParams, uniform_B: Tensor, strict: bool) -> tuple[Tensor, Tensor]:
    """Draw one token per row by inverting the cumulative distribution, in FP64.

    Args:
        logits_BV: float32, or float64 in strict mode.
        uniform_B: float64 in [0, 1); greedy rows do not use it.

    Returns:
        token_B int64, and logprob_B [nats] of the distribution drawn from: after temperature, top-k and top-p. A
        greedy row takes the most likely token and reports its log-prob at temperature 1, untruncated.
    """
    if not params.draws:
        best_B = logits_BV.argmax(-1)
        return best_B, ops.token_logprob(logits_BV, best_B, strict)
    greedy_B = params.temperature_B == 0
    temperature_B = 1.0 if params.plain else params.temperature_B.masked_fill(greedy_B, 1.0)
    logprob_BV = ops.log_softmax(logits_BV, strict, temperature_B)
    if params.truncates:
        kept_BV = ops.log_softmax(truncate(logprob_BV, params), strict)
        logprob_BV = torch.where(greedy_B[:, None], logprob_BV, kept_BV)
    token_B = _invert(logprob_BV.double().exp(), uniform_B)
    if params.greedy:
        token_B = torch.where(greedy_B, logits_BV.argmax(-1), token_B)
    return token_B, logprob_BV.gather(-1, token_B[:, None])[:, 0]


def _invert(prob_BV: Tensor, uniform_B: Tensor) -> Tensor:
    """The first token whose cumulative probability exceeds ``uniform`` times the total. float64.

    By pieces of the vocabulary first: a cumulative sum over a whole row would read it in one long chain.
    """
    prob_BcW = F.pad(prob_BV, (0, -prob_BV.shape[1] % _PIECE)).unflatten(1, (-1, _PIECE))
    end_Bc = prob_BcW.sum(-1).cumsum(-1)
    target_B1 = (uniform_B * end_Bc[:, -1])[:, None]
    piece_B1 = torch.searchsorted(end_Bc, target_B1, right=True)
    before_B1 = F.pad(end_Bc, (1, 0)).gather(1, piece_B1)
    prob_BW = prob_BcW[torch.arange(len(prob_BV), device=prob_BV.device), piece_B1[:, 0]]
    inside_B1 = torch.searchsorted(before_B1 + prob_BW.cumsum(-1), target_B1, right=True)
    # the two sums may differ by a rounding, so that none of the piece exceeds: then its last possible token
    last_B1 = ((prob_BW > 0) * torch.arange(_PIECE, device=prob_BV.device)).amax(-1, keepdim=True)
    return (piece_B1 * _PIECE + torch.minimum(inside_B1, last_B1))[:, 0]
