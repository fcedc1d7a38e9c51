"""Stretches of a layer for the backend "native": triton's, but for the experts, which multiply on FP4 tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.backends.cutlass import expert_rows, ops
from minite.backends.cutlass.weights import NativeWeight
from minite.backends.triton import moe
from minite.backends.triton.layers import FusedLayers
from minite.formats.nvfp4 import OUTER_MAX


class NativeFused(FusedLayers):
    """Implements backends.base.Fused."""

    def experts(
        self,
        x_TH: Tensor,
        prob_Tk: Tensor,
        expert_Tk: Tensor,
        num_experts: int,
        gate_up: object,
        down: object,
        inputs: tuple[str, str],
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
