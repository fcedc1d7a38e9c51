"""Mixture-of-experts routing and row movement, shared by learner and sampler.

Numerics: the routing probability multiplies the expert's output after down_proj; both are FP32 (FP64 in strict mode),
a token's experts are summed in ascending expert order, and the sum is rounded once to the storage dtype.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from minite.backends.base import Fused
from minite.layers.pointwise import work_dtype


def route_topk(logits_TE: Tensor, k: int, replay_Tk: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """The k experts of each token and their probabilities, renormalised over the chosen.

    logits float32 or float64 [T, E] -> (prob_Tk of the same dtype, expert_Tk int64). Equal logits: the lower index
    wins. softmax over all experts renormalised over the chosen equals softmax over the chosen logits, which is what
    is computed. ``replay_Tk`` (any integer dtype) gives the experts of rows recorded elsewhere; a row that starts with
    -1 keeps its own choice. A recorded row must hold k different experts, in the recorder's order.
    """
    expert_Tk = logits_TE.detach().sort(dim=-1, descending=True, stable=True).indices[:, :k]
    if replay_Tk is not None:
        expert_Tk = torch.where(replay_Tk[:, :1] >= 0, replay_Tk.to(expert_Tk.dtype), expert_Tk)
    return logits_TE.gather(-1, expert_Tk).softmax(dim=-1), expert_Tk


def _sum_rows(x_RH: Tensor, token_R: Tensor, num_tokens: int) -> Tensor:
    """out[t] = sum of the rows whose token is t, added in row order on every device. -> [T, H], the dtype of x.

    One pass per rank of a row within its token: no pass holds a token twice, so nothing depends on atomic adds.
    """
    order_R = token_R.argsort(stable=True)
    count_T = torch.bincount(token_R, minlength=num_tokens)
    rank_R = torch.arange(len(token_R), device=token_R.device) - (count_T.cumsum(0) - count_T)[token_R[order_R]]
    out_TH = x_RH.new_zeros(num_tokens, x_RH.shape[1])
    for rank in range(int(count_T.max()) if num_tokens else 0):
        row_n = order_R[rank_R == rank]
        out_TH = out_TH.index_add(0, token_R[row_n], x_RH[row_n])
    return out_TH


class _GatherRows(torch.autograd.Function):
    """x[token]; its gradient sums a token's rows in FP32 (FP64 for float64 rows) and rounds once."""

    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, token_R: Tensor) -> Tensor:
        ctx.save_for_backward(token_R)
        ctx.num_tokens = x_TH.shape[0]
        return x_TH[token_R]

    @staticmethod
    def backward(ctx: Any, grad_RH: Tensor) -> tuple[Tensor, None]:
        (token_R,) = ctx.saved_tensors
        work = work_dtype(strict=grad_RH.dtype == torch.float64)
        return _sum_rows(grad_RH.to(work), token_R, ctx.num_tokens).to(grad_RH.dtype), None


class _SumRows(torch.autograd.Function):
    """``_sum_rows`` with its gradient, a gather."""

    @staticmethod
    def forward(ctx: Any, x_RH: Tensor, token_R: Tensor, num_tokens: int) -> Tensor:
        ctx.save_for_backward(token_R)
        return _sum_rows(x_RH, token_R, num_tokens)

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor, None, None]:
        (token_R,) = ctx.saved_tensors
        return grad_TH[token_R], None, None


def moe_permute(x_TH: Tensor, expert_Tk: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """One row per (token, expert) pair, sorted by expert and, within an expert, by token.

    -> (x_RH with R = T k, token_R int64, rows_E int64 rows per expert, slot_R int64). ``slot_R`` indexes
    ``prob_Tk.flatten()``: the rows' probabilities are ``prob_Tk.flatten()[slot_R]``.
    """
    expert_R = expert_Tk.flatten()
    slot_R = expert_R.argsort(stable=True)
    token_R = slot_R // expert_Tk.shape[1]
    return _GatherRows.apply(x_TH, token_R), token_R, torch.bincount(expert_R, minlength=num_experts), slot_R


class _FusedCombine(torch.autograd.Function):
    """The backend's kernel forward; backward as autograd gives it for the steps."""

    @staticmethod
    def forward(ctx: Any, y_RH: Tensor, prob_R: Tensor, token_R: Tensor, num_tokens: int, fused: Fused) -> Tensor:
        ctx.save_for_backward(y_RH, prob_R, token_R)
        out_TH = fused.combine(y_RH, prob_R, token_R, num_tokens)
        return moe_combine(y_RH, prob_R, token_R, num_tokens, strict=False) if out_TH is None else out_TH

    @staticmethod
    def backward(ctx: Any, grad_TH: Tensor) -> tuple[Tensor | None, ...]:
        y_RH, prob_R, token_R = ctx.saved_tensors
        grad_RH = grad_TH[token_R].float()
        dprob_R = (grad_RH * y_RH.float()).sum(-1).to(prob_R.dtype) if ctx.needs_input_grad[1] else None
        return (grad_RH * prob_R.float()[:, None]).to(y_RH.dtype), dprob_R, None, None, None


def moe_combine(
    y_RH: Tensor, prob_R: Tensor, token_R: Tensor, num_tokens: int, strict: bool, fused: Fused | None = None
) -> Tensor:
    """sum over the rows of a token of prob * y, ascending expert order. -> [T, H], the dtype of y, rounded once.

    Rows are as ``moe_permute`` gives them (a rank that owns some of the experts may pass its rows only). Tokens without
    rows get 0. ``fused``: the backend's, which is one kernel with the same bits; not for strict.
    """
    if fused is not None:
        out_TH: Tensor = _FusedCombine.apply(y_RH, prob_R, token_R, num_tokens, fused)
        return out_TH
    work = work_dtype(strict)
    weighted_RH = y_RH.to(work) * prob_R.to(work)[:, None]
    return _SumRows.apply(weighted_RH, token_R, num_tokens).to(y_RH.dtype)
