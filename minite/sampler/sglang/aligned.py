"""With ``alignment: aligned``: what lies between the GEMMs is computed by layers/ops.py, as the learner computes it.

SGLang's own norms, rotary embedding and activations round elsewhere; FP4 codes turn such last bits into whole steps.
Each function is a hook around one of SGLang's and passes the call on where no aligned plan is in use. Attention on a
GPU is ours where the backend has a kernel for the heads, else SGLang's. The hooks also note what passes while a
comparison watches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from minite.backends.base import Fused
from minite.layers import ops
from minite.sampler.sglang import inside
from minite.sampler.sglang.watching import Watch

Original = Callable[..., Any]


def active() -> bool:
    """True in a scheduler process that runs an aligned plan."""
    state = inside.current()
    return state is not None and state.plan.alignment == "aligned"


def watch() -> Watch | None:
    """Where to note what passes, while somebody watches this process (watching.py)."""
    state = inside.current()
    return None if state is None else state.watch


def fused() -> Fused | None:
    """The fused kernels of this process's backend."""
    state = inside.current()
    return None if state is None else state.backend.fused


def rms_norm(sglangs: Original, norm: Any, x: Tensor, residual: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
    """Around RMSNorm.forward: x, or x + residual, normalised; in the second case the sum too, rounded before use."""
    if active():
        total = x if residual is None else x + residual
        out = ops.rms_norm(total, norm.weight, norm.variance_epsilon, strict=False, fused=fused())
        answer = out if residual is None else (out, total)
    else:
        answer = sglangs(norm, x, residual, *args, **kwargs)
    if (seen := watch()) is not None:
        out, total = (answer, x) if residual is None else answer
        seen.op("rms_norm", out, total, norm.weight, norm.variance_epsilon)
    return answer


def qk_norm(
    sglangs: Original, q: Tensor, k: Tensor, q_norm: Any, k_norm: Any, head_dim: int, *args: Any, **kwargs: Any
) -> Any:
    """Around apply_qk_norm: every head of [T, heads * D] by itself."""
    if not active():
        if (seen := watch()) is None:
            return sglangs(q, k, q_norm, k_norm, head_dim, *args, **kwargs)
        before = (q.clone(), k.clone())  # they may be overwritten
        with seen.muted():
            after = sglangs(q, k, q_norm, k_norm, head_dim, *args, **kwargs)
        for x, y, norm in zip(before, after, (q_norm, k_norm), strict=True):
            seen.op("rms_norm", y, x, norm.weight, norm.variance_epsilon)
        return after
    return tuple(norm(x.reshape(-1, head_dim)).view(x.shape) for x, norm in ((q, q_norm), (k, k_norm)))


def rope(sglangs: Original, rotary: Any, positions: Tensor, q: Tensor, k: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Around RotaryEmbedding.forward, q and k [T, heads * D]. The tables are FP32, one row per position."""
    seen, size = watch(), rotary.head_size
    if not active():
        if seen is None:
            return sglangs(rotary, positions, q, k, *args, **kwargs)
        before = (q.clone(), k.clone())
        after = sglangs(rotary, positions, q, k, *args, **kwargs)
        cos, sin = rotary.cos_sin_cache[positions.flatten()].float().chunk(2, dim=-1)
        for x, y in zip(before, after, strict=True):
            seen.op("apply_rope", y.reshape(len(cos), -1, size), x.reshape(len(cos), -1, size), cos, sin, False)
        return after
    if not hasattr(rotary, "minite_tables"):
        every = torch.arange(rotary.max_position_embeddings, device=q.device)
        rotary.minite_tables = ops.rope_cos_sin(every, size, rotary.base)
    cos, sin = (table[positions.flatten()] for table in rotary.minite_tables)
    rotated = []
    for x_THD in (x.reshape(len(cos), -1, size) for x in (q, k)):
        rotated.append(ops.apply_rope(x_THD, cos, sin, strict=False))
        if seen is not None:
            seen.op("apply_rope", rotated[-1], x_THD, cos, sin, False)
    return tuple(y_THD.flatten(1) for y_THD in rotated)


def no_fused_kv_write(sglangs: Original, *args: Any, **kwargs: Any) -> Any:
    """Around enable_fused_set_kv_buffer: ``rope`` above does not write to the KV cache in passing."""
    return False if active() else sglangs(*args, **kwargs)


def swiglu(sglangs: Original, module: Any, x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Around SiluAndMul.forward."""
    out = ops.swiglu(x, strict=False, fused=fused()) if active() else sglangs(module, x, *args, **kwargs)
    if (seen := watch()) is not None:
        seen.op("swiglu", out, x)
    return out


def lm_head(sglangs: Original, processor: Any, x_MK: Tensor, head: Any, *args: Any, **kwargs: Any) -> Tensor:
    """Around LogitsProcessor._compute_lm_head: FP32 logits from the operands as they are, where the plan wants FP32."""
    state = inside.current()
    if state is None or not active() or state.plan.lm_head_dtype != "fp32":
        logits_MV = sglangs(processor, x_MK, head, *args, **kwargs)
    else:
        logits_MV = ops.wide_linear(x_MK, head.weight, strict=False, fused=fused())
    if state is not None and state.watch is not None:
        words = state.plan.model["vocab_size"]  # SGLang pads them
        state.watch.op("wide_linear", logits_MV[:, :words], x_MK, head.weight[:words])
    return logits_MV


def attention(sglangs: Original, module: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Around RadixAttention.forward, to note it: q [T, heads * D], and keys and values as the cache holds them."""
    out = sglangs(module, q, k, v, *args, **kwargs)
    if (seen := watch()) is not None:
        seen.attention(module.layer_id, q.reshape(len(q), -1, module.head_dim), out)
    return out


def forward(sglangs: Original, runner: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    """Around ModelRunner.forward, to watch it."""
    seen = watch()
    return (
        sglangs(runner, batch, *args, **kwargs)
        if seen is None
        else seen.forward(sglangs, runner, batch, *args, **kwargs)
    )


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


def extend_paged(
    sglangs: Original,
    q: Tensor,
    o: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    k_scale: float,
    v_scale: float,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    prefix_lens: Tensor,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around extend_attention_fwd_unified, on a GPU: new tokens [T, H, D]; kv_indices has the slots of all tokens."""
    kernels = paged_kernels(q, k_pool, v_pool)
    if kernels is not None:
        starts_S1, sequences = kv_indptr[: len(prefix_lens) + 1], len(prefix_lens)
        where = (qo_indptr[: sequences + 1], prefix_lens, starts_S1[:-1], kv_indices)
        out_THD = kernels.attention_paged(q, k_pool, v_pool, *where, kwargs["sm_scale"])
        if out_THD is not None:
            return o.copy_(out_THD)
    given = (q, o, k_pool, v_pool, k_scale, v_scale, qo_indptr, kv_indptr, kv_indices, prefix_lens)
    return sglangs(*given, *args, **kwargs)


def decode_paged(
    sglangs: Original,
    q: Tensor,
    k_pool: Tensor,
    v_pool: Tensor,
    o: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    logits: Tensor,
    lse: Tensor,
    splits: Tensor,
    max_splits: int,
    scale: float,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around decode_attention_fwd, on a GPU: one new token [B, H, D] each, already in the cache."""
    kernels = paged_kernels(q, k_pool, v_pool)
    if kernels is not None:
        starts_B1 = kv_indptr[: len(q) + 1]
        out_BHD = kernels.attention_decode(q, k_pool, v_pool, starts_B1[:-1], starts_B1.diff(), scale, slots=kv_indices)
        if out_BHD is not None:
            return o.copy_(out_BHD)
    given = (q, k_pool, v_pool, o, kv_indptr, kv_indices, logits, lse, splits, max_splits, scale)
    return sglangs(*given, *args, **kwargs)


def paged_kernels(q: Tensor, k_pool: Tensor, v_pool: Tensor) -> Fused | None:
    """The backend's kernels where an aligned plan runs and the cache is one that they read in place."""
    if not active() or not (k_pool.is_contiguous() and v_pool.is_contiguous()) or k_pool.dtype != q.dtype:
        return None
    return fused()
