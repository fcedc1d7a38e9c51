"""Stretches of a layer for the backend "native": triton's, but for the experts, which multiply on FP4 tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.backends.cutlass import expert_rows, norm, ops
from minite.backends.cutlass.weights import NativeWeight
from minite.backends.triton import moe
from minite.backends.triton.layers import FusedLayers
from minite.formats import QTensor
from minite.formats.nvfp4 import OUTER_MAX


class NativeFused(FusedLayers):
    """Implements backends.base.Fused."""

    def norm_quantize(
        self, x_TH: Tensor, y_TH: Tensor | None, w_H: Tensor, eps: float, how: str, reader: object, keep: bool
    ) -> tuple[Tensor, Tensor | None, object] | None:
        """As add_rms_norm or rms_norm, then quantize_input; block scales where the GEMM of ``reader`` wants them."""
        given = (x_TH, w_H) if y_TH is None else (x_TH, w_H, y_TH)
        bf16 = all(t.dtype == torch.bfloat16 for t in given)
        if not isinstance(reader, NativeWeight) or how != "nvfp4_row" or not bf16:
            return None
        y_TH = None if y_TH is None else y_TH.contiguous()
        operands = (x_TH.contiguous(), y_TH, w_H.contiguous(), eps, keep, reader.dense)
        total, normed, codes, scales, amax = norm.norm_quantize(*operands)
        layout = "swizzled" if reader.dense else "linear"  # experts copy rows before they tile their scales
        shape = (len(x_TH), x_TH.shape[1])
        quantized = QTensor("nvfp4", codes, scales.view(torch.float8_e4m3fn), amax, shape, (1, 16), layout)
        return x_TH if y_TH is None else total, normed if keep else None, quantized

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
        """As moe_permute, quantize, grouped_gemm, swiglu, quantize, grouped_gemm and moe_combine, in a few kernels.

        A token is quantized once; its codes are copied to its experts, and scales go straight to their tiles.
        """
        native = isinstance(gate_up, NativeWeight) and isinstance(down, NativeWeight)
        if not native and set(inputs) == {"bf16"}:
            return super().experts(x_TH, prob_Tk, expert_Tk, num_experts, gate_up, down, inputs)
        if not native or inputs != ("nvfp4_row", "nvfp4_row") or x_TH.dtype != torch.bfloat16:
            return None
        assert isinstance(gate_up, NativeWeight) and isinstance(down, NativeWeight)
        routing = moe.Routing.of(expert_Tk, num_experts)
        offsets = ops.expert_offsets(routing.rows_E)
        if isinstance(quantized, QTensor):
            assert quantized.block_scale is not None and quantized.amax is not None and quantized.layout == "linear"
            tokens = quantized.codes, quantized.block_scale.view(torch.uint8), quantized.amax
        else:
            tokens = ops.quantize(x_TH.contiguous(), None, None, False, 1, False)
        x_RH = expert_rows.permute(*tokens, routing.token_R, offsets)
        gate_up_R2I = _product(x_RH, gate_up, offsets)
        h_RI = ops.quantize(gate_up_R2I, None, offsets, True, 1, True)
        y_RH = _product(h_RI, down, offsets)
        return expert_rows.combine(y_RH, prob_Tk.float().contiguous(), routing.position_Tk.contiguous())


def _product(a: tuple[Tensor, Tensor, Tensor], b: NativeWeight, offsets: Tensor) -> Tensor:
    codes, tiles, amax = a
    alpha = 1 / (OUTER_MAX * b.source.outer_max)
    out: Tensor = ops.gemm(codes, tiles, amax, b.codes, b.tiles, b.amax, offsets, alpha, torch.bfloat16)
    return out
