"""How the other libraries quantize, in their own order of arithmetic, for the table of differences in the README.

Per tensor, 1x16 blocks, from the formulas in their sources: torchao 0.18 (mx_formats/nvfp4_tensor.py), ModelOpt 0.47
(qtensor/nvfp4_tensor.py), compressed-tensors 0.20 (quantization/utils/helpers.py). Each returns codes uint8 [M, K],
block scales e4m3 [M, K/16] and the outer scale it stores.
"""

from __future__ import annotations

import torch

from minite.formats.rounding import e2m1_code


def _codes(y, *, negative_zero):
    codes = e2m1_code(y)
    return codes if negative_zero else torch.where((y >= 0) | y.isnan(), codes & 7, codes)


def _e4m3(x, low):
    return x.clamp(low, 448).to(torch.float8_e4m3fn)


def modelopt(x):
    blocks = x.float().unflatten(-1, (-1, 16))
    outer = x.float().abs().max() / 2688
    ratio = blocks.abs().amax(-1) / (6 * outer)
    scale = _e4m3(torch.where(ratio == 0, 1.0, ratio), 2.0**-9)
    y = blocks / (scale.float() * outer).unsqueeze(-1)
    return _codes(y, negative_zero=False).flatten(-2), scale, outer


def torchao(x):
    blocks = x.float().unflatten(-1, (-1, 16))
    outer = x.float().abs().max() / 2688
    scale = _e4m3(blocks.abs().amax(-1) / 6 / outer, 2.0**-6)
    y = blocks * (outer.reciprocal() / scale.float()).unsqueeze(-1)
    return _codes(y.clamp(-6, 6), negative_zero=True).flatten(-2), scale, outer


def compressed_tensors(x):
    blocks = x.unflatten(-1, (-1, 16))
    outer = (2688 / x.abs().max()).float()  # in the dtype of x
    ratio = outer * (blocks.abs().amax(-1) / 6).float()
    scale = _e4m3(ratio, 0)
    scale = torch.where(scale.float() == 0, 0.125, scale.float()).to(torch.float8_e4m3fn)
    y = blocks.float() / (scale.float() / outer).unsqueeze(-1)
    return _codes(y, negative_zero=False).flatten(-2), scale, outer


WRITERS = {"modelopt": modelopt, "torchao": torchao, "compressed_tensors": compressed_tensors}
