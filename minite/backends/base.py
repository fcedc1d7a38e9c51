"""What computes a GEMM or a quantizer. Layers and samplers know a plan and a Backend, nothing else."""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

from minite.formats.qtensor import QTensor

Operand = Tensor | QTensor  # a plain tensor is a BF16 (or FP32) operand


class Fused(Protocol):
    """Stretches of a layer in fewer kernels, whose rows do not depend on the rows beside them. Forward only, bfloat16.

    SwiGLU, route, combine and experts give the bits that ``layers.ops`` and the backend give step by step, on the same
    device; the others have sums of their own, the same in any batch. None means "not these operands": the caller goes
    step by step.
    """

    def rms_norm(self, x: Tensor, w_K: Tensor, eps: float) -> Tensor | None: ...  # as ops.rms_norm

    # (x + y, rms_norm of it), both [T, H]
    def add_rms_norm(self, x_TH: Tensor, y_TH: Tensor, w_H: Tensor, eps: float) -> tuple[Tensor, Tensor] | None: ...

    # (x + y or, without y, x; its norm, None unless ``keep``; what quantize_input(norm, how) gives), in one kernel, for
    # the GEMM of the prepared weight ``reader``
    def norm_quantize(
        self, x_TH: Tensor, y_TH: Tensor | None, w_H: Tensor, eps: float, how: str, reader: object, keep: bool
    ) -> tuple[Tensor, Tensor | None, object] | None: ...

    # q, k, v of [T, heads + 2 KV heads, D]: rms_norm of the heads of q and k by ``norms`` (None: no norm), then
    # ops.apply_rope. ``pools`` (keys, values [slots, KV heads, D], slots int64 [T]): k and v are written there, and k
    # and v of the result are the pools.
    def heads(
        self,
        qkv_THD: Tensor,
        kv_heads: int,
        norms: tuple[Tensor, Tensor] | None,
        eps: float,
        cos: Tensor,
        sin: Tensor,
        pools: tuple[Tensor, Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor, Tensor] | None: ...

    def route(self, logits_TE: Tensor, top: int) -> tuple[Tensor, Tensor] | None: ...  # as ops.route_topk, no replay

    def swiglu(self, gate_up_R2I: Tensor) -> Tensor | None: ...  # [R, I]; as ops.swiglu

    def wide_linear(self, x_MK: Tensor, w_NK: Tensor) -> Tensor | None: ...  # float32 [M, N]; as ops.wide_linear

    def attention(
        self, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, cu_seqlens: Tensor, scale: float
    ) -> Tensor | None: ...  # as ops.attention

    def decodes(self, heads: int, kv_heads: int, head_dim: int) -> bool: ...  # whether attention_decode takes these

    def attention_decode(
        self,
        q_BHD: Tensor,
        k_pool: Tensor,
        v_pool: Tensor,
        first_B: Tensor,
        length_B: Tensor,
        scale: float,
        slots: Tensor | None = None,
    ) -> Tensor | None: ...  # the bits of attention's last row; keys of b begin at first_B[b] of the pools or of slots

    # the bits of attention for new tokens behind prefix_S cached ones; key j of s at slots[first_S[s] + j] of the pools
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
    ) -> Tensor | None: ...

    # [T, H]; as ops.moe_combine, where every token has equally many rows
    def combine(self, y_RH: Tensor, prob_R: Tensor, token_R: Tensor, num_tokens: int) -> Tensor | None: ...

    # [T, H]; permute, gate_up, SwiGLU, down, combine. inputs: the operands of both GEMMs; quantized: what norm_quantize
    # gave for x_TH and gate_up, if it did
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
    ) -> Tensor | None: ...


class Backend(Protocol):
    """One way to compute. D_MN = A_MK @ B_NK.T; accumulation is FP32, or FP64 with ``strict``.

    ``prepare`` turns a weight into whatever the backend's GEMM reads fastest (for an emulation: codes x block scales,
    exact in BF16). It is called once per weight version; the result is opaque to callers and valid only for the
    backend that made it. ``decode`` says that most GEMMs will have few rows, so that the bytes of the weight are what
    they cost. The numbers are the same.
    """

    name: str
    kind: str  # "reference" | "emulated" | "native": printed wherever the backend is printed
    strict: bool
    fused: Fused | None  # None: layers go step by step
    paths: tuple[str, ...]  # which kernel serves which shape, where there is a choice: for minite doctor

    def unsupported_reason(self, op: str, weight: str, input: str) -> str | None: ...  # None = supported

    def quantize(
        self, x_MK: Tensor, how: str, *, amax: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Operand: ...  # how: a name of config.operands; "bf16" returns x itself

    # the first argument of gemm and grouped_gemm and nothing else, so it need not exist as codes
    def quantize_input(self, x_MK: Tensor, how: str, *, amax: Tensor | None = None) -> object: ...

    def prepare(self, w: Operand, *, decode: bool = False) -> object: ...

    def gemm(self, a_MK: Any, b_NK: object, out_dtype: torch.dtype) -> Tensor: ...

    # strict only: as gemm where ranks hold parts of K; partial is a layers.matmul.PartialSums
    def gemm_of_parts(self, a_MK: Any, b_NK: object, out_dtype: torch.dtype, partial: Any) -> Tensor: ...

    def grouped_gemm(self, a_RK: Any, b_ENK: object, rows_E: Tensor, out_dtype: torch.dtype) -> Tensor: ...

    # [E, N, K] = dy_e.T @ x_e; zeros for an expert without rows
    def grouped_wgrad(self, dy_RN: Tensor, x_RK: Tensor, rows_E: Tensor, dtype: torch.dtype) -> Tensor: ...

    # The same of columnwise codes [N, R] and [K, R]: dy with an outer scale per row of the result, x with one. Experts
    # have multiples of layers.nvfp4_gradients.PADDED columns, not none, together at most R.
    def grouped_wgrad_of_codes(
        self, dy_NR: QTensor, x_KR: QTensor, columns_E: Tensor, dtype: torch.dtype
    ) -> Tensor: ...
