"""Stretches of a layer with this backend's kernels: the row of the backend protocol called ``fused``."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from minite.backends.reference import Prepared
from minite.backends.triton import attention, fused, heads, moe
from minite.backends.triton.quantize import fake_quantize
from minite.formats.nvfp4 import OUTER_MAX

if TYPE_CHECKING:
    from minite.backends.triton.backend import TritonBackend


class FusedLayers:
    """Implements backends.base.Fused with the GEMMs of ``backend``."""

    def __init__(self, backend: TritonBackend) -> None:
        self._backend = backend

    def rms_norm(self, x: Tensor, w_K: Tensor, eps: float) -> Tensor | None:
        """As layers.ops.rms_norm, with exact sums."""
        if not _normed(x, w_K):
            return None
        rows = x.reshape(-1, x.shape[-1]).contiguous()  # reshape alone leaves megatron's keys strided
        return _plain(fused.rms_norm(rows, w_K, eps, ("plain",))).view(x.shape)

    def add_rms_norm(self, x_TH: Tensor, y_TH: Tensor, w_H: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
        """(x + y, rms_norm of it)."""
        if not _normed(x_TH, w_H) or y_TH.dtype != torch.bfloat16:
            return None
        out = fused.rms_norm(x_TH.contiguous(), w_H, eps, ("plain",), y_TH.contiguous())
        assert out.total is not None
        return out.total, _plain(out)

    def norm_quantize(
        self, x_TH: Tensor, y_TH: Tensor | None, w_H: Tensor, eps: float, how: str, reader: object, keep: bool
    ) -> tuple[Tensor, Tensor | None, object] | None:
        """None: norm and quantize_input are two kernels here, and a GEMM may read either's result."""
        return None

    def heads(
        self,
        qkv_THD: Tensor,
        kv_heads: int,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        pools: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """As rms_norm of the heads of q and k, layers.ops.apply_rope, and the copy to the pools."""
        stored = qkv_THD.dtype if pools is None else pools[0].dtype
        if qkv_THD.dtype != torch.bfloat16 or stored != torch.bfloat16 or not heads.fits(qkv_THD.shape[-1]):
            return None
        return heads.heads(qkv_THD.contiguous(), kv_heads, norms, eps, cos, sin, pools)

    def route(self, logits_TE: Tensor, top: int) -> tuple[Tensor, Tensor] | None:
        """As layers.ops.route_topk without replay."""
        if logits_TE.dtype != torch.float32 or not moe.routes(logits_TE.shape[1], top):
            return None
        return moe.route(logits_TE.contiguous(), top)

    def swiglu(self, gate_up_R2I: Tensor) -> Tensor | None:
        """As layers.ops.swiglu."""
        if gate_up_R2I.dtype != torch.bfloat16 or gate_up_R2I.shape[1] % 32 != 0:
            return None
        return fused.swiglu(gate_up_R2I.contiguous(), ("plain",)).plain

    def wide_linear(self, x_MK: Tensor, w_NK: Tensor) -> Tensor | None:
        """As layers.ops.wide_linear: exact products, float32 sums."""
        if x_MK.dtype != torch.bfloat16 or w_NK.dtype != torch.bfloat16 or not w_NK.is_contiguous():
            return None
        return self._backend.gemm(x_MK.contiguous(), Prepared(w_NK.detach(), None), torch.float32)

    def attention(self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, cu_seqlens: Tensor, scale: float) -> Tensor | None:
        """As layers.ops.attention."""
        if not attention.fits(q_THD, k_THD.shape[1]):
            return None
        return attention.attention(q_THD, k_THD, v_THD, cu_seqlens.to(q_THD.device), scale)

    def decodes(self, heads: int, kv_heads: int, head_dim: int) -> bool:
        """Whether attention_decode takes BF16 queries of this shape."""
        return attention.takes(heads, kv_heads, head_dim)

    def attention_decode(
        self,
        q_BHD: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        first_B: Tensor,
        length_B: Tensor,
        scale: float,
        slots: Tensor | None = None,
    ) -> Tensor | None:
        """One token of each sequence over all that the pools hold of it."""
        if not attention.fits(q_BHD, k_pool.shape[1]):
            return None
        return attention.attention_decode(q_BHD, k_pool, v_pool, first_B, length_B, scale, slots)

    def attention_paged(
        self,
        q_THD: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        cu_queries: Tensor,
        prefix_S: Tensor,
        first_S: Tensor,
        slots: Tensor,
        scale: float,
    ) -> Tensor | None:
        """New tokens of each sequence behind those that the pools hold of it already."""
        if not attention.fits(q_THD, k_pool.shape[1]):
            return None
        return attention.attention_paged(q_THD, k_pool, v_pool, cu_queries, prefix_S, first_S, slots, scale)

    def combine(self, y_RH: Tensor, prob_R: Tensor, token_R: Tensor, num_tokens: int) -> Tensor | None:
        """As layers.ops.moe_combine."""
        rows = len(token_R)
        if y_RH.dtype != torch.bfloat16 or not rows or rows % num_tokens:
            return None
        position_R = token_R.argsort(stable=True)
        position_Tk = position_R.view(num_tokens, rows // num_tokens)
        prob_Tk = prob_R.float()[position_R].view_as(position_Tk)
        return moe.combine(y_RH.contiguous(), prob_Tk, position_Tk.int())

    def experts(
        self,
        x_TH: Tensor,
        prob_Tk: Tensor,
        expert_Tk: Tensor,
        num_experts: int,
        gate_up: object,
        down: object,
        inputs: tuple[str, str],
        quantized: object = None,
    ) -> Tensor | None:
        """As moe_permute, quantize, grouped_gemm, swiglu, quantize, grouped_gemm and moe_combine.

        A token is quantized before its rows are copied: row-scaled codes do not depend on where a row lies.
        """
        if x_TH.dtype != torch.bfloat16 or x_TH.shape[1] % 16 or not set(inputs) <= {"nvfp4_row", "bf16"}:
            return None
        routing = moe.Routing.of(expert_Tk, num_experts)
        product = self._backend.grouped_gemm
        if inputs[0] == "nvfp4_row":
            x_RH = Prepared(*routing.spread(*fake_quantize(x_TH, "row")), OUTER_MAX)
        else:
            x_RH = Prepared(*routing.spread(x_TH.contiguous(), None))
        gate_up_R2I = product(x_RH, gate_up, routing.rows_E, torch.bfloat16)
        if gate_up_R2I.shape[1] % 32:
            return None
        h = fused.swiglu(gate_up_R2I, ("values",) if inputs[1] == "nvfp4_row" else ("plain",))
        h_RI = Prepared(h.plain, None) if h.values is None else Prepared(h.values, h.amax, OUTER_MAX)
        return moe.combine(product(h_RI, down, routing.rows_E, torch.bfloat16), prob_Tk.float(), routing.position_Tk)


def _normed(x: Tensor, w_K: Tensor) -> bool:
    """Whether fused.rms_norm takes these."""
    return x.dtype == w_K.dtype == torch.bfloat16 and x.shape[-1] % 16 == 0


def _plain(out: fused.Outputs) -> Tensor:
    assert out.plain is not None
    return out.plain
