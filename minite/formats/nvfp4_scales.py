"""Scales of NVFP4 in float32, in the order of TransformerEngine's kernels; formulas in the docstring of nvfp4.py."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.formats.rounding import E2M1_MAX, E4M3_MAX, e4m3

FLT_MAX = torch.finfo(torch.float32).max
OUTER_MAX = E2M1_MAX * E4M3_MAX  # 2688: the amax of a tensor maps to the largest code times the largest block scale


def outer_encode(amax: Tensor, outer_max: float = OUTER_MAX) -> Tensor:
    """S_enc = min(outer_max / amax, FLT_MAX), and 1 where amax == 0 or S_enc == 0 (an infinite amax). float32."""
    # torch computes scalar / tensor as scalar * reciprocal(tensor), which rounds twice: divide tensors instead
    s_enc = (torch.full_like(amax, outer_max) / amax).clamp_(max=FLT_MAX)
    return torch.where((amax == 0) | (s_enc == 0), torch.ones_like(s_enc), s_enc)


def block_scale(block_amax: Tensor, s_enc: Tensor) -> Tensor:
    """s_b = e4m3(min(amax_b * (S_enc * fl(1/6)), FLT_MAX)): the decode scale of each block, may be 0."""
    return e4m3((block_amax * (s_enc * (1 / 6))).clamp_(max=FLT_MAX))


def encode_factor(scale: Tensor, s_enc: Tensor) -> Tensor:
    """enc_b = min(1 / (float(s_b) * (1 / S_enc)), FLT_MAX): what elements are multiplied with. float32."""
    return (scale.to(torch.float32) * s_enc.reciprocal()).reciprocal_().clamp_(max=FLT_MAX)
