"""The experts of a layer, from the normed input to the summed output, without waiting for the device.

A token is quantized once, before its rows are copied to k experts: row-scaled codes do not depend on where a row lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite.backends.reference import Prepared
from minite.backends.triton import fused
from minite.backends.triton.quantize import fake_quantize
from minite.formats.nvfp4 import OUTER_MAX

if TYPE_CHECKING:
    from minite.backends.triton.backend import TritonBackend


@dataclass(frozen=True)
class Routing:
    """Rows sorted by expert and, within an expert, by token, as layers.moe.moe_permute sorts them."""

    token_R: Tensor  # int64
    rows_E: Tensor  # int64
    position_Tk: Tensor  # int32: where the row of (token, choice) lies

    @classmethod
    def of(cls, expert_Tk: Tensor, num_experts: int) -> Routing:
        """expert_Tk integers [T, k]."""
        sorted_R, slot_R = expert_Tk.flatten().sort(stable=True)
        position_R = torch.empty_like(slot_R, dtype=torch.int32)
        position_R[slot_R] = torch.arange(len(slot_R), dtype=torch.int32, device=slot_R.device)
        edges = torch.arange(num_experts + 1, dtype=sorted_R.dtype, device=sorted_R.device)
        rows_E = torch.searchsorted(sorted_R, edges).diff()  # bincount would wait for the device
        return cls(slot_R // expert_Tk.shape[1], rows_E, position_R.view_as(expert_Tk))


@triton.jit
def _combine_kernel(y, position, prob, out, H, TOP: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr):
    token, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    choice = tl.arange(0, PADDED)
    where = tl.load(position + token * TOP + choice, choice < TOP, other=2147483647)
    weight = tl.load(prob + token * TOP + choice, choice < TOP, other=0)
    acc = tl.zeros((BLOCK,), tl.float32)
    row = -1
    for _ in tl.static_range(TOP):  # ascending rows are ascending experts, whatever the order of choices
        row = tl.min(tl.where(where > row, where, 2147483647))
        mine = tl.sum(tl.where(where == row, weight, 0))
        acc += tl.load(y + row.to(tl.int64) * H + column, column < H, other=0).to(tl.float32) * mine
    tl.store(out + token * H + column, acc.to(out.dtype.element_ty), column < H)


def combine(y_RH: Tensor, prob_Tk: Tensor, position_Tk: Tensor) -> Tensor:
    """sum of prob * y over the rows of a token: BF16 [T, H], as layers.moe.moe_combine gives it, to the bit.

    prob float32 [T, k]; position int32 [T, k], the row of each choice.
    """
    (tokens, top), hidden = prob_Tk.shape, y_RH.shape[1]
    out_TH = torch.empty(tokens, hidden, dtype=y_RH.dtype, device=y_RH.device)
    if tokens:
        block = min(2048, triton.next_power_of_2(hidden))
        _combine_kernel[(tokens, triton.cdiv(hidden, block))](
            y_RH, position_Tk.contiguous(), prob_Tk.contiguous(), out_TH, hidden,
            TOP=top, PADDED=triton.next_power_of_2(top), BLOCK=block, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out_TH


class FusedLayers:
    """Implements backends.base.Fused with the GEMMs of ``backend``."""

    def __init__(self, backend: TritonBackend) -> None:
        self._backend = backend

    def swiglu(self, gate_up_R2I: Tensor) -> Tensor | None:
        """As layers.ops.swiglu."""
        if gate_up_R2I.dtype != torch.bfloat16 or gate_up_R2I.shape[1] % 32 != 0:
            return None
        return fused.swiglu(gate_up_R2I.contiguous(), ("plain",)).plain

    def combine(self, y_RH: Tensor, prob_R: Tensor, token_R: Tensor, num_tokens: int) -> Tensor | None:
        """As layers.ops.moe_combine."""
        rows = len(token_R)
        if y_RH.dtype != torch.bfloat16 or not rows or rows % num_tokens:
            return None
        position_R = token_R.argsort(stable=True)
        position_Tk = position_R.view(num_tokens, rows // num_tokens)
        prob_Tk = prob_R.float()[position_R].view_as(position_Tk)
        return combine(y_RH.contiguous(), prob_Tk, position_Tk.int())

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
        """As moe_permute, quantize, grouped_gemm, swiglu, quantize, grouped_gemm and moe_combine."""
        if x_TH.dtype != torch.bfloat16 or x_TH.shape[1] % 16 or not set(inputs) <= {"nvfp4_row", "bf16"}:
            return None
        routing = Routing.of(expert_Tk, num_experts)
        token_R, product = routing.token_R, self._backend.grouped_gemm
        if inputs[0] == "nvfp4_row":
            values_TH, amax_T = fake_quantize(x_TH, "row")
            x_RH = Prepared(values_TH[token_R], amax_T[token_R], OUTER_MAX)
        else:
            x_RH = Prepared(x_TH[token_R], None)
        gate_up_R2I = product(x_RH, gate_up, routing.rows_E, torch.bfloat16)
        if gate_up_R2I.shape[1] % 32:
            return None
        h = fused.swiglu(gate_up_R2I, ("values",) if inputs[1] == "nvfp4_row" else ("plain",))
        h_RI = Prepared(h.plain, None) if h.values is None else Prepared(h.values, h.amax, OUTER_MAX)
        return combine(product(h_RI, down, routing.rows_E, torch.bfloat16), prob_Tk.float(), routing.position_Tk)
