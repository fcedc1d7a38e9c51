"""One outer scale for a fused pair that was exported with two, without touching a code.

An engine that multiplies q, k, v or gate, up in one GEMM uses one outer scale for all and does not requantize, so the
members with another scale come out wrong by the ratio. Here the largest outer scale becomes everyone's and block
scales take up the ratio:

    s'_b = e4m3(float(s_b) * outer / outer')      outer' = max over the members, so nothing saturates

It costs the rounding of s'_b to E4M3: at most 1/16 of a block while s'_b is at least 2^-6, more below (subnormals), and
all of it where s'_b becomes 0. A power of two as the ratio costs nothing above 2^-6.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from minite.formats import QTensor
from minite.formats.rounding import e4m3


@dataclass(frozen=True)
class ScaleCost:
    """What sharing an outer scale costs one tensor, over its blocks with a scale above 0."""

    tensor: str
    ratio: float  # its outer scale over the shared one; at most 1, but for a member of zeros
    max_relative: float  # error of a block, 1 for one that became 0
    mean_relative: float
    underflowed: int  # blocks that were not 0 and now are


def outer_of(q: QTensor) -> Tensor:
    """The outer amax of an NVFP4 matrix: float32 []."""
    assert q.amax is not None
    return q.amax


def share_outer(group: Mapping[str, QTensor]) -> tuple[dict[str, QTensor], list[ScaleCost]]:
    """The members under the largest amax among them, and the cost for each. Codes stay as they are.

    A member of zeros has no say: exporters give it the outer scale 1, under which the others would vanish.
    """
    zeros = {name for name, q in group.items() if not bool((q.codes & 0x77).any())}
    speaking = [outer_of(q) for name, q in group.items() if name not in zeros] or [outer_of(q) for q in group.values()]
    shared = torch.stack(speaking).amax()
    result, costs = {}, []
    for name, q in group.items():
        assert q.block_scale is not None
        ratio = float(outer_of(q)) / float(shared)
        if name in zeros or ratio == 1:
            result[name] = replace(q, amax=shared.clone())
            costs.append(ScaleCost(name, ratio, 0.0, 0.0, 0))
            continue
        # float64, because the exact product is what the rounded one is compared with
        exact = q.block_scale.double() * (outer_of(q).double() / shared.double())
        rounded = e4m3(exact.float())
        result[name] = replace(q, block_scale=rounded, amax=shared.clone())
        costs.append(_cost(name, exact, rounded, ratio))
    return result, costs


def untied(group: Mapping[str, QTensor]) -> bool:
    """Whether the members have more than one outer scale."""
    amaxes = [float(outer_of(q)) for q in group.values()]
    return len(set(amaxes)) > 1


def _cost(name: str, exact: Tensor, rounded: Tensor, ratio: float) -> ScaleCost:
    alive = exact > 0
    relative = ((rounded.double() - exact).abs() / exact)[alive]
    return ScaleCost(
        tensor=name,
        ratio=ratio,
        max_relative=float(relative.max()) if relative.numel() else 0.0,
        mean_relative=float(relative.mean()) if relative.numel() else 0.0,
        underflowed=int((alive & (rounded.double() == 0)).sum()),
    )
