"""Rows to experts and back, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor


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
