"""The placebo of the TRIAGE evidence: the same weights at other tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.losses.tokens import LossTokens
from minite.losses.triage import push_on_gap


def shuffled(weight_N: Tensor, tokens: LossTokens, generator: torch.Generator) -> Tensor:
    """Weights dealt out anew among the tokens of a response whose gap the update widens. float [N], as ``weight_N``.

    Every response keeps its weights, and every token that the update does not push apart its own.
    """
    index_N = torch.nonzero(push_on_gap(tokens) > 0).flatten()
    order_N = torch.rand(len(index_N), generator=generator).argsort()
    order_N = order_N[tokens.response_N[index_N][order_N].argsort(stable=True)]  # by response again, mixed within it
    mixed_N = weight_N.clone()
    mixed_N[index_N] = weight_N[index_N[order_N]]
    return mixed_N
