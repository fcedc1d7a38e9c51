"""The functions that learner and sampler share: both call these and nothing of their own.

Each takes ``strict``: accumulate in FP64 and round once to the storage dtype (else FP32). In strict mode a token's
result is the same bits alone, in any batch, prefilled or decoded.
"""

from minite.layers.attention import attention, attention_decode
from minite.layers.kv import dequantize_kv, quantize_kv
from minite.layers.logprob import entropy, log_softmax, token_logprob
from minite.layers.moe import moe_combine, moe_permute, route_topk
from minite.layers.pointwise import apply_rope, rms_norm, rope_cos_sin, round_output, swiglu, wide_linear, work_dtype

__all__ = [
    "apply_rope",
    "attention",
    "attention_decode",
    "dequantize_kv",
    "entropy",
    "log_softmax",
    "moe_combine",
    "moe_permute",
    "quantize_kv",
    "rms_norm",
    "rope_cos_sin",
    "round_output",
    "route_topk",
    "swiglu",
    "token_logprob",
    "wide_linear",
    "work_dtype",
]
