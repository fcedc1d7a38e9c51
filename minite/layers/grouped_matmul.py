"""The linears of all experts of a layer at once: matmul.py by expert, each with an outer weight scale of its own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from minite.backends.base import Backend
from minite.formats import QTensor
from minite.layers import nvfp4_gradients
from minite.layers.matmul import (
    NO_HOOKS,
    AmaxHooks,
    LinearSpecLike,
    check_operands,
    original_or_dequantized,
    prepare_weight,
    quantize_reduced,
    save_operands,
    saved_operands,
)
from minite.layers.weight_cache import PreparedWeight, WeightCache


def _stacked(weights: Sequence[Tensor]) -> Tensor:
    """[E, N, K] of either form of expert weights; a copy only for separate ones."""
    return weights[0] if weights[0].ndim == 3 else torch.stack(list(weights))


class _QuantGroupedMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_RK: Tensor,
        rows_E: Tensor,
        weight: PreparedWeight,
        spec: LinearSpecLike,
        backend: Backend,
        hooks: AmaxHooks,
        out_dtype: torch.dtype,
        name: str,
        *weights: Tensor,
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[0], any(ctx.needs_input_grad[8:])
        kept = needs_w and spec.wgrad == "dequantized"
        a_RK = quantize_reduced(x_RK, spec.input, backend, hooks.reduce_input_amax, f"input of {name}", kept)
        codes_ENK = weight.quantized if spec.dgrad == "dequantized" and isinstance(weight.quantized, QTensor) else None
        save_operands(
            ctx,
            original_or_dequantized(x_RK, a_RK, spec.wgrad) if needs_w else None,
            codes_ENK if needs_x else None,
            *(weights if needs_x and codes_ENK is None else ()),
        )
        ctx.rows_E, ctx.backend, ctx.dtype, ctx.num_weights = rows_E, backend, x_RK.dtype, len(weights)
        ctx.stacked, ctx.spec, ctx.name = weights[0].ndim == 3, spec, name
        return backend.grouped_gemm(a_RK, weight.operand, rows_E, out_dtype)

    @staticmethod
    def backward(ctx: Any, dy_RN: Tensor) -> tuple[Tensor | None, ...]:
        x_RK, w_ENK, *originals = saved_operands(ctx, ctx.dtype)
        backend: Backend = ctx.backend
        common = backend, ctx.dtype, ctx.name
        dy_RN = dy_RN.to(ctx.dtype)
        dx_RK: Tensor | None = None
        if ctx.needs_input_grad[0]:
            w_ENK = _stacked([w for w in originals if w is not None]) if w_ENK is None else w_ENK
            if ctx.spec.dgrad == "nvfp4":
                dx_RK = nvfp4_gradients.grouped_dgrad(dy_RN, w_ENK, ctx.rows_E, *common)
            else:
                w_EKN = backend.prepare(w_ENK.transpose(1, 2))
                dx_RK = backend.grouped_gemm(dy_RN, w_EKN, ctx.rows_E, ctx.dtype)
        dw: list[Tensor | None] = [None] * ctx.num_weights
        if x_RK is not None:
            if ctx.spec.wgrad == "nvfp4":
                dw_ENK = nvfp4_gradients.grouped_wgrad(dy_RN, x_RK, ctx.rows_E, *common)
            else:
                dw_ENK = backend.grouped_wgrad(dy_RN, x_RK, ctx.rows_E, ctx.dtype)
            dw = [dw_ENK] if ctx.stacked else [*dw_ENK]
        return dx_RK, None, None, None, None, None, None, None, *dw


def quant_grouped_matmul(
    x_RK: Tensor,
    weights: Tensor | Sequence[Tensor],
    rows_E: Tensor,
    spec: LinearSpecLike,
    backend: Backend,
    cache: WeightCache | None = None,
    amax_hooks: AmaxHooks = NO_HOOKS,
    *,
    out_dtype: torch.dtype | None = None,
    name: str = "experts",
) -> Tensor:
    """Rows of expert e times the transpose of weight e, for all experts. -> [R, N], as ``quant_matmul`` otherwise.

    x [R, K] sorted by expert; ``rows_E`` int64 [E] on the device of x, summing to R: zeros and R = 0 are allowed.
    ``weights`` is [E, N, K] or E tensors [N, K]; each expert has an outer scale of its own, and the weight hook gets
    all of them as one float32 [E]. An expert without rows gets a zero gradient.
    """
    parts = (weights,) if isinstance(weights, Tensor) else tuple(weights)
    check_operands(x_RK, parts[0], name)

    def make() -> PreparedWeight:
        stacked_ENK = _stacked([w.detach() for w in parts])
        return prepare_weight(stacked_ENK, spec.weight, backend, amax_hooks.reduce_weight_amax, f"weight of {name}")

    weight = make() if cache is None else cache.get(parts, make)
    result: Tensor = _QuantGroupedMatmul.apply(
        x_RK, rows_E, weight, spec, backend, amax_hooks, out_dtype or x_RK.dtype, name, *parts
    )
    return result
