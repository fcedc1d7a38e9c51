"""Stretches of a layer for the backend "native": triton's, but for the experts, which multiply on FP4 tensor cores."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.backends.cutlass import ops
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
        """As moe_permute, quantize, grouped_gemm, swiglu, quantize, grouped_gemm and moe_combine, in four kernels of
        ours and a few of torch's: rows are gathered while they are quantized, and scales go straight to their tiles.
        """
        native = isinstance(gate_up, NativeWeight) and isinstance(down, NativeWeight)
        if not native and set(inputs) == {"bf16"}:
            return super().experts(x_TH, prob_Tk, expert_Tk, num_experts, gate_up, down, inputs)
        if not native or inputs != ("nvfp4_row", "nvfp4_row") or x_TH.dtype != torch.bfloat16:
            return None
        assert isinstance(gate_up, NativeWeight) and isinstance(down, NativeWeight)
        routing = moe.Routing.of(expert_Tk, num_experts)
        offsets = ops.expert_offsets(routing.rows_E)
        x_RH = ops.quantize(x_TH.contiguous(), None, offsets, routing.token_R, True, 1, False)
        gate_up_R2I = _product(x_RH, gate_up, offsets)
        h_RI = ops.quantize(gate_up_R2I, None, offsets, None, True, 1, True)
        return moe.combine(_product(h_RI, down, offsets), prob_Tk.float(), routing.position_Tk)


def _product(a: tuple[Tensor, Tensor, Tensor], b: NativeWeight, offsets: Tensor) -> Tensor:
    codes, tiles, amax = a
    alpha = 1 / (OUTER_MAX * b.source.outer_max)
    out: Tensor = ops.gemm(codes, tiles, amax, b.codes, b.tiles, b.amax, offsets, alpha, torch.bfloat16)
    return out
