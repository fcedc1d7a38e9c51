"""Rows to experts and back, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

_FEW = 4096  # pairs of a token and an expert that are sorted by comparing each with each
_PAIRS, _OTHERS = 32, 256  # of a program; compared with at once
_LOGITS = 1024  # of a program of _route_kernel
_MAX_EXPERTS, _MAX_TOP = 1024, 32


@triton.jit
def _halves_summed(x, ROWS: tl.constexpr, LOG: tl.constexpr):
    """Sums over the last axis of x [ROWS, 2^LOG]: upper half to lower half, then again, as torch's softmax adds."""
    for _ in tl.static_range(LOG):
        folded = tl.permute(tl.reshape(x, (ROWS, 2, x.shape[1] // 2)), (0, 2, 1))
        lower, upper = tl.split(folded)
        x = lower + upper
    return tl.reshape(x, (ROWS,))


@triton.jit
def _route_kernel(
    logits, prob, expert, tokens, E,
    TOP: tl.constexpr, LOG: tl.constexpr, EP: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The TOP largest of a row, in order; of equals the first. A NaN is the largest, as torch sorts it."""
    row, column = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS), tl.arange(0, EP)
    inside = (row < tokens)[:, None] & (column < E)[None, :]
    x = tl.load(logits + row[:, None] * E + column[None, :], inside, other=0.0) + 0.0  # -0 is no less than 0
    bits = tl.where(x != x, 0x7FC00000, x.to(tl.int32, bitcast=True))
    ordered = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    key = (ordered << 32) | (EP - 1 - column)[None, :].to(tl.int64)
    key = tl.where(column[None, :] < E, key, -0x7FFFFFFFFFFFFFFF - 1)
    PADDED: tl.constexpr = 2**LOG
    choice = tl.arange(0, PADDED)
    chosen = tl.full((ROWS, PADDED), float("-inf"), tl.float32)
    largest = tl.zeros((ROWS,), tl.float32)
    for j in tl.static_range(TOP):
        best = tl.max(key, 1)
        index = EP - 1 - (best & 0xFFFFFFFF).to(tl.int32)
        taken = column[None, :] == index[:, None]
        value = tl.sum(tl.where(taken, x, 0.0), 1)
        key = tl.where(taken, -0x7FFFFFFFFFFFFFFF - 1, key)
        if j == 0:
            largest = value
        chosen = tl.where(choice[None, :] == j, value[:, None], chosen)
        tl.store(expert + row * TOP + j, index.to(tl.int64), row < tokens)
    e = libdevice.exp(chosen - largest[:, None])
    total = _halves_summed(e, ROWS, LOG)
    p = tl.div_rn(e, tl.broadcast_to(total[:, None], (ROWS, PADDED)))
    tl.store(prob + row[:, None] * TOP + choice[None, :], p, (row < tokens)[:, None] & (choice < TOP)[None, :])


def route(logits_TE: Tensor, top: int) -> tuple[Tensor, Tensor]:
    """As layers.moe.route_topk without replay, to the bit of what torch computes on a GPU. float32 [T, E]."""
    tokens, experts = logits_TE.shape
    prob_Tk = torch.empty(tokens, top, dtype=torch.float32, device=logits_TE.device)
    expert_Tk = torch.empty(tokens, top, dtype=torch.int64, device=logits_TE.device)
    if tokens:
        padded = triton.next_power_of_2(experts)
        rows = max(1, _LOGITS // padded)
        _route_kernel[(triton.cdiv(tokens, rows),)](
            logits_TE, prob_Tk, expert_Tk, tokens, experts,
            TOP=top, LOG=(top - 1).bit_length(), EP=padded, ROWS=rows, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return prob_Tk, expert_Tk


def routes(experts: int, top: int) -> bool:
    """Whether _route_kernel takes a router of this size."""
    return experts <= _MAX_EXPERTS and top <= min(experts, _MAX_TOP)


@triton.jit(do_not_specialize=["count", "E"])
def _place_kernel(
    expert, position, token, rows, count, E, TOP: tl.constexpr, PAIRS: tl.constexpr, OTHERS: tl.constexpr
):
    """Where pair i lies among pairs sorted by (expert, i); program 0 .. also count the rows of expert i."""
    i = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    mine = tl.load(expert + i, i < count, other=0).to(tl.int32)[:, None]
    before = tl.zeros((PAIRS,), tl.int32)
    held = tl.zeros((PAIRS,), tl.int32)
    for start in range(0, count, OTHERS):
        j = start + tl.arange(0, OTHERS)
        other = tl.load(expert + j, j < count, other=2147483647).to(tl.int32)[None, :]
        earlier = (other == mine) & (j[None, :] < i[:, None])
        before += tl.sum(((other < mine) | earlier).to(tl.int32), 1)
        held += tl.sum((other == i[:, None]).to(tl.int32), 1)
    tl.store(position + i, before, i < count)
    tl.store(token + before, (i // TOP).to(tl.int64), i < count)
    tl.store(rows + i, held.to(tl.int64), i < E)


@triton.jit
def _spread_kernel(x, amax, position, out, out_amax, K, TOP: tl.constexpr, BLOCK: tl.constexpr):
    pair = tl.program_id(0).to(tl.int64)
    row = tl.load(position + pair).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + row * K + column, tl.load(x + pair // TOP * K + column, column < K, other=0), column < K)
    if amax is not None:
        tl.store(out_amax + row, tl.load(amax + pair // TOP))


@dataclass(frozen=True)
class Routing:
    """Rows sorted by expert and, within an expert, by token, as layers.moe.moe_permute sorts them."""

    token_R: Tensor  # int64
    rows_E: Tensor  # int64
    position_Tk: Tensor  # int32: where the row of (token, choice) lies

    @classmethod
    def of(cls, expert_Tk: Tensor, num_experts: int) -> Routing:
        """expert_Tk integers [T, k]."""
        if 0 < expert_Tk.numel() <= _FEW:
            return cls._of_few(expert_Tk.contiguous(), num_experts)
        sorted_R, slot_R = expert_Tk.flatten().sort(stable=True)
        position_R = torch.empty_like(slot_R, dtype=torch.int32)
        position_R[slot_R] = torch.arange(len(slot_R), dtype=torch.int32, device=slot_R.device)
        edges = torch.arange(num_experts + 1, dtype=sorted_R.dtype, device=sorted_R.device)
        rows_E = torch.searchsorted(sorted_R, edges).diff()  # bincount would wait for the device
        return cls(slot_R // expert_Tk.shape[1], rows_E, position_R.view_as(expert_Tk))

    @classmethod
    def _of_few(cls, expert_Tk: Tensor, num_experts: int) -> Routing:
        """The same in one kernel, for which it pays that a sort is many."""
        count, device = expert_Tk.numel(), expert_Tk.device
        position_Tk = torch.empty(expert_Tk.shape, dtype=torch.int32, device=device)
        token_R, rows_E = (torch.empty(n, dtype=torch.int64, device=device) for n in (count, num_experts))
        _place_kernel[(triton.cdiv(max(count, num_experts), _PAIRS),)](
            expert_Tk, position_Tk, token_R, rows_E, count, num_experts,
            TOP=expert_Tk.shape[1], PAIRS=_PAIRS, OTHERS=_OTHERS, num_warps=4,
        )  # fmt: skip
        return cls(token_R, rows_E, position_Tk)

    def spread(self, x_TK: Tensor, amax_T: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """(x[token], amax[token]): one row for each choice of a token."""
        pairs, k = self.position_Tk.numel(), x_TK.shape[1]
        out_RK = torch.empty(pairs, k, dtype=x_TK.dtype, device=x_TK.device)
        amax_R = None if amax_T is None else torch.empty(pairs, dtype=amax_T.dtype, device=x_TK.device)
        if pairs:
            block = min(2048, triton.next_power_of_2(k))
            _spread_kernel[(pairs, triton.cdiv(k, block))](
                x_TK, amax_T, self.position_Tk, out_RK, amax_R, k, TOP=self.position_Tk.shape[1], BLOCK=block
            )
        return out_RK, amax_R


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
