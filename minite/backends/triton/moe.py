"""The experts of a layer in emulated W4A4, from the normed input to the summed output, without waiting for the device.

A token is quantized once, before its rows are copied to k experts: row-scaled codes do not depend on where a row lies.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from minite.backends.reference import Prepared
from minite.backends.triton import fused, grouped
from minite.backends.triton.quantize import fake_quantize
from minite.formats.nvfp4 import OUTER_MAX


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


def combine(y_RH: Tensor, prob_Tk: Tensor, routing: Routing) -> Tensor:
    """sum of prob * y over the rows of a token: BF16 [T, H], as layers.moe.moe_combine gives it, to the bit."""
    (tokens, top), hidden = prob_Tk.shape, y_RH.shape[1]
    out_TH = torch.empty(tokens, hidden, dtype=y_RH.dtype, device=y_RH.device)
    if tokens:
        block = min(2048, triton.next_power_of_2(hidden))
        _combine_kernel[(tokens, triton.cdiv(hidden, block))](
            y_RH, routing.position_Tk, prob_Tk, out_TH, hidden,
            TOP=top, PADDED=triton.next_power_of_2(top), BLOCK=block, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out_TH


def experts_w4a4(x_TH: Tensor, prob_Tk: Tensor, expert_Tk: Tensor, gate_up: Prepared, down: Prepared) -> Tensor:
    """sum over a token's experts of prob * down(silu(gate) * up). BF16 x [T, H] -> BF16 [T, H].

    gate_up [E, 2 I, H] and down [E, H, I]: prepared NVFP4 weights with amax [E]; prob float32 [T, k].
    """
    values_TH, amax_T = fake_quantize(x_TH, "row")
    routing = Routing.of(expert_Tk, gate_up.values.shape[0])
    x = Prepared(values_TH[routing.token_R], amax_T[routing.token_R], OUTER_MAX)
    gate_up_R2I = grouped.gemm(x, gate_up, torch.bfloat16, routing.rows_E)
    h = fused.swiglu(gate_up_R2I, ("values",))
    assert h.values is not None
    y_RH = grouped.gemm(Prepared(h.values, h.amax, OUTER_MAX), down, torch.bfloat16, routing.rows_E)
    return combine(y_RH, prob_Tk, routing)
