"""FP8 storage of keys and values.

Scale rule, the only one: scale 1.0. It is what SGLang does for an ``fp8_e4m3`` cache when a checkpoint carries no
calibrated k_scale and v_scale. Keys of Qwen3 pass an RMS norm, so 448 is far away; E4M3 keeps 4 significant bits
between 2^-6 and 448, and what lies above saturates.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0


def quantize_kv(x_THD: Tensor) -> Tensor:
    """Keys or values (after norm and RoPE) as stored: float8_e4m3fn, same shape. RNE, saturating; NaN stays NaN."""
    return x_THD.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def dequantize_kv(codes_THD: Tensor, dtype: torch.dtype) -> Tensor:
    """What attention reads: exact in BF16, FP32 and FP64.

    A prefill must attend to ``dequantize_kv(quantize_kv(x))`` too, or a token's value would depend on whether its
    context was prefilled or decoded.
    """
    return codes_THD.to(dtype)
