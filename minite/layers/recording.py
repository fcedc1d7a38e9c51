"""Notes what the shared operations of ops.py are given and make of it: to compare two engines call by call.

Learner and sampler both call ``ops.<name>``; within ``recorded`` these names lead here. GEMMs are noted by their
backend (backends/recording.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from minite.backends.recording import OpCall, row_hash
from minite.layers import ops


def _rms_norm(out: Tensor, x: Tensor, w_K: Tensor, eps: float, *_: Any) -> OpCall:
    return OpCall("rms_norm", {"x": x}, {"y": out}, parameters={"norm eps": eps, "norm weight": w_K})


def _apply_rope(out: Tensor, x_THD: Tensor, cos: Tensor, sin: Tensor, strict: bool) -> OpCall:
    return OpCall("apply_rope", {"x": x_THD}, {"y": out}, {"RoPE table": torch.cat((cos, sin), dim=-1)})


def _attention(out: Tensor, q_THD: Tensor, k_THD: Tensor, v_THD: Tensor, *_: Any) -> OpCall:
    return OpCall("attention", {"q": q_THD, "k": k_THD, "v": v_THD}, {"y": out})


def _attention_decode(out: Tensor, q_BHD: Tensor, k_BLHD: Tensor, v_BLHD: Tensor, lengths_B: Tensor, *_: Any) -> OpCall:
    """With each token's own key and value only: those before it were noted at their own steps."""
    row_B = torch.arange(len(q_BHD), device=q_BHD.device)
    own = {name: x[row_B, lengths_B - 1] for name, x in (("k", k_BLHD), ("v", v_BLHD))}
    return OpCall("attention", {"q": q_BHD, **own}, {"y": out})


def _wide_linear(out: Tensor, x_MK: Tensor, w_NK: Tensor, *_: Any) -> OpCall:
    return OpCall("wide_linear", {"x": x_MK}, {"y": out}, parameters={"weight": row_hash(w_NK)})


def _route_topk(out: tuple[Tensor, Tensor], logits_TE: Tensor, *_: Any) -> OpCall:
    """The chosen experts in ascending order, so that a choice in another order is no difference."""
    expert_Tk, order_Tk = out[1].sort(dim=-1)
    return OpCall("route_topk", {"x": logits_TE}, {"experts": expert_Tk, "probability": out[0].gather(-1, order_Tk)})


def _swiglu(out: Tensor, gate_up: Tensor, *_: Any) -> OpCall:
    return OpCall("swiglu", {"x": gate_up}, {"y": out})


def _moe_combine(out: Tensor, y_RH: Tensor, prob_R: Tensor, *_: Any) -> OpCall:
    return OpCall("moe_combine", {"rows": y_RH, "probability": prob_R}, {"y": out})


_NOTES: dict[str, Callable[..., OpCall]] = {
    "rms_norm": _rms_norm,
    "apply_rope": _apply_rope,
    "attention": _attention,
    "attention_decode": _attention_decode,
    "wide_linear": _wide_linear,
    "route_topk": _route_topk,
    "swiglu": _swiglu,
    "moe_combine": _moe_combine,
}


def noted(op: str, out: Any, *args: Any) -> OpCall:
    """What the shared operation ``op`` was given and made of it."""
    return _NOTES[op](out, *args)


@contextmanager
def recorded(note: Callable[[OpCall], None]) -> Iterator[None]:
    """Within the block every call of these operations is handed to ``note``, from whatever thread. Not nested."""
    originals = {name: getattr(ops, name) for name in _NOTES}

    def noting(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            out = function(*args, **kwargs)
            note(_NOTES[name](out, *args, **kwargs))
            return out

        return call

    try:
        for name, function in originals.items():
            setattr(ops, name, noting(name, function))
        yield
    finally:
        for name, function in originals.items():
            setattr(ops, name, function)
