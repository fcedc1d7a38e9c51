"""Log-probabilities of the sampling distribution, [nats], in FP32 (FP64 in strict mode), never rounded further."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.layers.pointwise import work_dtype


def log_softmax(logits_TV: Tensor, strict: bool, temperature: float | Tensor = 1.0) -> Tensor:
    """log_softmax(logits / temperature) over the vocabulary. -> float32 (float64 if strict) [T, V].

    ``temperature`` > 0 is one number or a tensor [T]; greedy decoding (temperature 0) is the caller's case. Logits of
    -inf (masked by top-k or top-p) give log-prob -inf.
    """
    work = work_dtype(strict)
    if isinstance(temperature, Tensor):
        temperature = temperature.to(work)[:, None]
    logits_TV = logits_TV.to(work)
    scaled_TV = logits_TV if isinstance(temperature, float) and temperature == 1 else logits_TV / temperature
    return torch.log_softmax(scaled_TV, dim=-1)


def token_logprob(logits_TV: Tensor, target_T: Tensor, strict: bool, temperature: float | Tensor = 1.0) -> Tensor:
    """Log-prob of one token per row: row t of the logits must be the one that predicts target_T[t]. -> [T]."""
    return log_softmax(logits_TV, strict, temperature).gather(-1, target_T[:, None]).squeeze(-1)


def entropy(logprob_TV: Tensor) -> Tensor:
    """-sum p log p of rows of log-probs; entries of -inf count 0. -> [T], the dtype of the input. [nats]"""
    prob_TV = logprob_TV.exp()
    return -(prob_TV * logprob_TV.masked_fill(prob_TV == 0, 0.0)).sum(dim=-1)
