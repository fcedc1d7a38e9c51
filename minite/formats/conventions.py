"""How libraries that exchange NVFP4 store the outer scale, and in which order they multiply when they read.

All store the same codes and E4M3 block scales; the outer scale is amax itself, its decode scale (about amax / 2688) or
its encode scale (about 2688 / amax). Each is rounded once more to float32, so none of them turns exactly into
another: 1 / (2688 / amax) equals amax / 2688 for only 63 % of BF16 amaxes. ``dequantize`` reads codes exactly as
their library does; ``amax_of`` gives the amax that miniTE keeps.

    te                  TransformerEngine   amax       code * ((s * amax) * fl(1/2688))    dequantize_nvfp4.cuh:67-77
    modelopt            ModelOpt            decode     code * (s * outer), -0 reads as 0   qtensor/nvfp4_tensor.py
    torchao             torchao             decode     code * (outer * s)                  mx_formats/nvfp4_tensor.py
    compressed_tensors  compressed-tensors  encode     bf16(code * (s / outer))            lifecycle/forward.py
    miles               miles               decode, 1 / fl(2688 / amax); read as modelopt  miles/utils/nvfp4.py:19-50

torchao multiplies outer * s in the dtype that the tensor had; this is its order for float32, which equals ModelOpt's
but for the sign of zero. compressed-tensors computes 2688 / amax in the dtype of the weights: from a BF16 checkpoint
the outer scale has 8 significant bits, so ``amax_of`` cannot recover the amax there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from minite.formats.e2m1 import code_values
from minite.formats.errors import FormatError
from minite.formats.nvfp4_scales import OUTER_MAX, outer_encode
from minite.formats.qtensor import in_blocks


@dataclass(frozen=True)
class Convention:
    """One library's way."""

    stored_as: str  # name of its outer scale tensor
    meaning: str  # "amax" | "decode" | "encode"
    outer_of: Callable[[Tensor], Tensor]  # float32 amax -> outer scale
    factor: Callable[[Tensor, Tensor], Tensor]  # float32 block scale, outer scale -> what codes are multiplied with
    dtype: torch.dtype = torch.float32  # of the values it reads
    keeps_negative_zero: bool = True


def dequantize(codes: Tensor, block_scale: Tensor, outer: Tensor, convention: str) -> Tensor:
    """Values [rows, K] as the library reads them, in its dtype.

    codes: uint8 [rows, K/2]; block_scale: float8_e4m3fn [rows, K/16]; outer: float32 [] or [1]. Raises FormatError.
    """
    how = lookup(convention)
    if outer.numel() != 1 or outer.dtype != torch.float32 or block_scale.dtype != torch.float8_e4m3fn:
        got = f"outer {outer.dtype} {list(outer.shape)}, block_scale {block_scale.dtype}"
        raise FormatError(f"conventions: {convention}: {got}; expected one float32 outer scale and float8_e4m3fn")
    values = code_values(codes, torch.float32)
    if not how.keeps_negative_zero:
        values = values + 0.0
    factor = how.factor(block_scale.to(torch.float32), outer.reshape(()))
    return (in_blocks(values, 16) * factor.unsqueeze(-1)).flatten(-2).to(how.dtype)


def amax_of(outer: Tensor, convention: str) -> Tensor:
    """The float32 amax that the outer scale was made from, as far as it can be told.

    More than one float32 may give the same outer scale. Taken is the one that bfloat16 can hold, if there is one:
    amaxes of BF16 weights come back exactly. Else the nearest that gives it, else the nearest.
    """
    how = lookup(convention)
    if how.meaning == "amax":
        return outer
    exact = outer.double() * OUTER_MAX if how.meaning == "decode" else OUTER_MAX / outer.double()
    near = exact.to(torch.float32)
    steps = (0, -1, 1, -2, 2)
    candidates = torch.stack([(near.view(torch.int32) + step).view(torch.float32) for step in steps])
    gives_it = how.outer_of(candidates) == outer
    in_bf16 = candidates.to(torch.bfloat16).to(torch.float32) == candidates
    rank = (gives_it.int() * 2 + (gives_it & in_bf16).int()) * len(steps) - torch.arange(len(steps)).view(
        -1, *[1] * outer.ndim
    ).to(outer.device)
    best = rank.argmax(0, keepdim=True)
    found = candidates.gather(0, best)[0]
    return torch.where(gives_it.any(0), found, near)


def lookup(convention: str) -> Convention:
    """Raises FormatError for an unknown name."""
    if convention not in CONVENTIONS:
        raise FormatError(f"conventions: {convention!r} is unknown; expected one of {', '.join(CONVENTIONS)}")
    return CONVENTIONS[convention]


def _amax_over_2688(amax: Tensor) -> Tensor:
    return amax / torch.full_like(amax, OUTER_MAX)  # by a number, torch would multiply with a reciprocal on a GPU


CONVENTIONS: dict[str, Convention] = {
    "te": Convention("amax", "amax", lambda amax: amax, lambda s, amax: (s * amax) * (1 / OUTER_MAX)),
    "modelopt": Convention(
        "weight_scale_2", "decode", _amax_over_2688, lambda s, outer: s * outer, keeps_negative_zero=False
    ),
    "torchao": Convention("per_tensor_scale", "decode", _amax_over_2688, lambda s, outer: outer * s),
    "compressed_tensors": Convention(
        "weight_global_scale", "encode", outer_encode, lambda s, outer: s / outer, dtype=torch.bfloat16
    ),
    "miles": Convention(
        "weight_scale_2",
        "decode",
        lambda amax: outer_encode(amax).reciprocal(),
        lambda s, outer: s * outer,
        keeps_negative_zero=False,
    ),
}
