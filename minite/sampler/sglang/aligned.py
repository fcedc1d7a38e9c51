"""With ``alignment: aligned``: what lies between the GEMMs is computed by layers/ops.py, as the learner computes it.

SGLang's own norms, rotary embedding and activations round elsewhere; FP4 codes turn such last bits into whole steps.
Each function is a hook around one of SGLang's and passes the call on where no aligned plan is in use. Attention is
ours on a CPU only; on a GPU it stays SGLang's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minite.backends.base import Fused
from minite.layers import ops
from minite.sampler.sglang import inside

Original = Callable[..., Any]


def active() -> bool:
    """True in a scheduler process that runs an aligned plan."""
    state = inside.current()
    return state is not None and state.plan.alignment == "aligned"


def fused() -> Fused | None:
    """The fused kernels of this process's backend."""
    state = inside.current()
    return None if state is None else state.backend.fused


def rms_norm(sglangs: Original, norm: Any, x: Tensor, residual: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Around RMSNorm.forward: x, or x + residual, normalised; in the second case the sum too, rounded before use."""
    if not active():
        return sglangs(norm, x, residual, *args, **kwargs)
    total = x if residual is None else x + residual
    out = ops.rms_norm(total, norm.weight, norm.variance_epsilon, strict=False, fused=fused())
    return out if residual is None else (out, total)


def qk_norm(
    sglangs: Original, q: Tensor, k: Tensor, q_norm: Any, k_norm: Any, head_dim: int, *args: Any, **kwargs: Any
) -> Any:
    """Around apply_qk_norm: every head of [T, heads * D] by itself."""
    if not active():
        return sglangs(q, k, q_norm, k_norm, head_dim, *args, **kwargs)
    return tuple(norm(x.reshape(-1, head_dim)).view(x.shape) for x, norm in ((q, q_norm), (k, k_norm)))


def rope(sglangs: Original, rotary: Any, positions: Tensor, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Around RotaryEmbedding.forward, q and k [T, heads * D]. The tables are FP32, one row per position."""
    if not active():
        return sglangs(rotary, positions, q, k, *args, **kwargs)
    if not hasattr(rotary, "minite_tables"):
        every = torch.arange(rotary.max_position_embeddings, device=q.device)
        rotary.minite_tables = ops.rope_cos_sin(every, rotary.head_size, rotary.base)
    cos, sin = (table[positions.flatten()] for table in rotary.minite_tables)
    heads = (x.reshape(len(cos), -1, rotary.head_size) for x in (q, k))
    return tuple(ops.apply_rope(x_THD, cos, sin, strict=False).flatten(1) for x_THD in heads)


def no_fused_kv_write(sglangs: Original, *args: Any, **kwargs: Any) -> Any:
    """Around enable_fused_set_kv_buffer: ``rope`` above does not write to the KV cache in passing."""
    return False if active() else sglangs(*args, **kwargs)


def swiglu(sglangs: Original, module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Around SiluAndMul.forward."""
    return ops.swiglu(x, strict=False, fused=fused()) if active() else sglangs(module, x, *args, **kwargs)


def lm_head(sglangs: Original, processor: Any, x_MK: Tensor, head: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Around LogitsProcessor._compute_lm_head: FP32 logits from the operands as they are, where the plan wants FP32."""
    state = inside.current()
    if state is None or not active() or state.plan.lm_head_dtype != "fp32":
        return sglangs(processor, x_MK, head, *args, **kwargs)
    return ops.wide_linear(x_MK, head.weight, strict=False, fused=fused())


def extend(
    sglangs: Original,
    attention: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_prefix_lens: Tensor,
    *args: Any,
    scaling: float,
    **kwargs: Any,
) -> Tensor:
    """Around TorchNativeAttnBackend._run_sdpa_forward_extend: new tokens [T, H, D] behind prefixes that are cached."""
    if not active():
        given = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens, extend_prefix_lens)
        return sglangs(attention, *given, *args, scaling=scaling, **kwargs)
    request, lengths_S = req_pool_indices.long(), seq_lens.long()
    starts_S1 = torch.nn.functional.pad(lengths_S.cumsum(0), (1, 0))
    sequence_T = torch.arange(len(lengths_S)).repeat_interleave(lengths_S)
    position_T = torch.arange(len(sequence_T)) - starts_S1[sequence_T]
    slot_T = req_to_token[request[sequence_T], position_T].long()
    new_T = position_T >= extend_prefix_lens.long()[sequence_T]
    q_THD = query.new_zeros(len(slot_T), *query.shape[1:])  # what is asked at cached positions does not matter
    q_THD[new_T] = query
    out_THD = ops.attention(q_THD, k_cache[slot_T], v_cache[slot_T], starts_S1, scaling, strict=False)
    return output.copy_(out_THD[new_T])


def decode(
    sglangs: Original,
    attention: Any,
    query: Tensor,
    output: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    *args: Any,
    scaling: float,
    **kwargs: Any,
) -> Tensor:
    """Around TorchNativeAttnBackend._run_sdpa_forward_decode: one new token [B, H, D] each, already in the cache."""
    if not active():
        given = (query, output, k_cache, v_cache, req_to_token, req_pool_indices, seq_lens)
        return sglangs(attention, *given, *args, scaling=scaling, **kwargs)
    slot_BL = req_to_token[req_pool_indices.long(), : int(seq_lens.max())].long()
    out_BHD = ops.attention_decode(query, k_cache[slot_BL], v_cache[slot_BL], seq_lens.long(), scaling, strict=False)
    return output.copy_(out_BHD)
