"""One linear as autograd sees it: y_MN = quantize(x_MK) @ quantize(w_NK).T with a choice of operands for the gradients.

Forward    y = round(A @ B.T), A = the input in ``spec.input``, B = the weight in ``spec.weight``.
dgrad      dx = dy @ W,        W = the original weight (``bf16``) or B dequantized (``dequantized``).
wgrad      dw = dy.T @ X,      X = the original input or A dequantized, likewise.
Both may be ``nvfp4`` instead: products of two quantized operands (nvfp4_gradients.py).

Both quantizers are straight-through: dx and dw are the gradients of the unquantized x and w. "dequantized" operands
are rounded to the storage dtype, as TransformerEngine's ``backward_override="dequantized"`` does. All three GEMMs run
in the backend: FP32 accumulation, FP64 in strict mode, one rounding of the result. There is no bias; Qwen3 has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from minite.backends.base import Backend, Operand
from minite.formats import FormatError, operand_amax
from minite.layers import nvfp4_gradients
from minite.layers.weight_cache import PreparedWeight, WeightCache

AmaxReduction = Callable[[Tensor], Tensor]


class LinearSpecLike(Protocol):
    """What layers read of a plan entry. LinearSpec, config.PlanEntry and config.schema.FormatConfig all have it."""

    @property
    def weight(self) -> str: ...
    @property
    def input(self) -> str: ...
    @property
    def dgrad(self) -> str: ...
    @property
    def wgrad(self) -> str: ...


@dataclass(frozen=True)
class LinearSpec:
    """Operands of the three GEMMs: names of config.operands for weight and input, of GRADIENT_CHOICES for the rest."""

    weight: str
    input: str
    dgrad: str
    wgrad: str


@dataclass(frozen=True)
class PartialSums:
    """How ranks that hold parts of K finish a product together: their sums are added before the outer scales.

    Scaled first, the parts would each be rounded, and a value that lies on a tie of the storage dtype, as products of
    short codes do, could fall to the other side than on one rank. Needs sums that are not rounded much: strict.
    """

    reduce: Callable[[Tensor], Tensor]  # this rank's float64 sums [M, N] -> its rows of the total [m, N]
    own_rows: Callable[[Tensor], Tensor]  # values by row [M] -> those of its rows [m]
    gather: Callable[[Tensor], Tensor]  # the gradient of its rows [m, N] -> of all rows [M, N]


@dataclass(frozen=True)
class AmaxHooks:
    """How a rank that holds a shard learns the amax of the whole.

    Each takes this rank's float32 amax (weight: [], or [experts]; input: [M] for nvfp4_row, [] for nvfp4_tensor) and
    returns the maximum over the ranks that share the matrix. Given the unsharded amax, shards cut at block borders get
    the very codes and scales of the unsharded matrix. A fused module (linear_qkv, linear_fc1) is one fusion group,
    so the amax of its whole weight is the group's. None = this rank holds the whole.
    """

    reduce_input_amax: AmaxReduction | None = None
    reduce_weight_amax: AmaxReduction | None = None
    partial: PartialSums | None = None  # for a part of K, strict


NO_HOOKS = AmaxHooks()


def quantize_reduced(
    x: Tensor, how: str, backend: Backend, reduce_amax: AmaxReduction | None, name: str, kept: bool = True
) -> Any:
    """``backend.quantize`` with the outer amax reduced over ranks first, where there is a reduction and a need.

    ``kept`` False: ``backend.quantize_input``, for an input that nothing but the GEMM will read.
    Raises FormatError (NonFiniteError for NaN or Inf) that begins with ``name``.
    """
    quantize = backend.quantize if kept else backend.quantize_input
    try:
        amax = operand_amax(x, how) if reduce_amax is not None else None
        if amax is not None and reduce_amax is not None:
            amax = reduce_amax(amax)
        return quantize(x, how, amax=amax)
    except FormatError as error:
        raise type(error)(f"{name}: {error}") from error


def prepare_weight(
    w: Tensor, how: str, backend: Backend, reduce_amax: AmaxReduction | None = None, name: str = "weight"
) -> PreparedWeight:
    """Quantizes a weight [N, K], or experts [E, N, K] with one outer scale each, and readies it for GEMMs."""
    quantized = quantize_reduced(w.detach(), how, backend, reduce_amax, name)
    return PreparedWeight(quantized, backend.prepare(quantized))


def original_or_dequantized(original: Tensor, operand: Operand, choice: str) -> Operand:
    """The gradient operand that ``choice`` names; for an operand that was never quantized both are the original."""
    return operand if choice == "dequantized" and not isinstance(operand, Tensor) else original


def save_operands(ctx: Any, *operands: Operand | None) -> None:
    """Keeps gradient operands: plain tensors where autograd guards them, codes (4.5 bits an element) on ctx."""
    ctx.save_for_backward(*(t if isinstance(t, Tensor) else None for t in operands))
    ctx.codes = tuple(None if isinstance(t, Tensor) else t for t in operands)


def saved_operands(ctx: Any, dtype: torch.dtype) -> list[Tensor | None]:
    """What ``save_operands`` kept, codes dequantized to ``dtype``."""
    return [
        plain if codes is None else codes.dequantize(dtype)
        for plain, codes in zip(ctx.saved_tensors, ctx.codes, strict=True)
    ]


class _QuantMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_MK: Tensor,
        w_NK: Tensor,
        weight: PreparedWeight,
        spec: LinearSpecLike,
        backend: Backend,
        hooks: AmaxHooks,
        out_dtype: torch.dtype,
        name: str,
    ) -> Tensor:
        needs_x, needs_w = ctx.needs_input_grad[:2]
        kept = needs_w and spec.wgrad == "dequantized"
        a_MK = quantize_reduced(x_MK, spec.input, backend, hooks.reduce_input_amax, f"input of {name}", kept)
        save_operands(
            ctx,
            original_or_dequantized(x_MK, a_MK, spec.wgrad) if needs_w else None,
            original_or_dequantized(w_NK, weight.quantized, spec.dgrad) if needs_x else None,
        )
        ctx.backend, ctx.x_dtype, ctx.w_dtype, ctx.partial = backend, x_MK.dtype, w_NK.dtype, hooks.partial
        ctx.spec, ctx.name = spec, name
        if hooks.partial is None:
            return backend.gemm(a_MK, weight.operand, out_dtype)
        return backend.gemm_of_parts(a_MK, weight.operand, out_dtype, hooks.partial)

    @staticmethod
    def backward(ctx: Any, dy_MN: Tensor) -> tuple[Tensor | None, ...]:
        backend: Backend = ctx.backend
        x_MK, w_NK = saved_operands(ctx, ctx.x_dtype)
        dy_MN = dy_MN.to(ctx.x_dtype)
        if ctx.partial is not None:
            dy_MN = ctx.partial.gather(dy_MN)
        dx_MK = dw_NK = None
        if w_NK is not None and ctx.spec.dgrad == "nvfp4":
            dx_MK = nvfp4_gradients.dgrad(dy_MN, w_NK, backend, ctx.x_dtype, ctx.name)
        elif w_NK is not None:
            dx_MK = backend.gemm(dy_MN, backend.prepare(w_NK.T), ctx.x_dtype)
        if x_MK is not None and ctx.spec.wgrad == "nvfp4":
            dw_NK = nvfp4_gradients.wgrad(dy_MN, x_MK, backend, ctx.w_dtype, ctx.name)
        elif x_MK is not None:
            dw_NK = backend.gemm(dy_MN.T, backend.prepare(x_MK.T), ctx.w_dtype)
        return dx_MK, dw_NK, None, None, None, None, None, None


def quant_matmul(
    x_MK: Tensor,
    w_NK: Tensor,
    spec: LinearSpecLike,
    backend: Backend,
    cache: WeightCache | None = None,
    amax_hooks: AmaxHooks = NO_HOOKS,
    *,
    out_dtype: torch.dtype | None = None,
    name: str = "linear",
) -> Tensor:
    """x @ w.T with the operands of ``spec``. -> [M, N], ``out_dtype`` (None = the dtype of x), rounded once.

    x [M, K] and w [N, K], both in the storage dtype of the model (bfloat16 or float32). ``cache`` keeps the quantized
    weight until w changes (see WeightCache); pass the parameter itself, not a view made for the call. A rank that
    holds a part of K asks for ``out_dtype=torch.float32`` so that the sum over ranks is rounded once, not each part,
    or gives ``amax_hooks.partial``: then the result is its rows of the total.
    Gradients are in the dtype of x and w; dy is rounded to it first. Raises FormatError that begins with ``name``.
    """
    check_operands(x_MK, w_NK, name)

    def make() -> PreparedWeight:
        return prepare_weight(w_NK, spec.weight, backend, amax_hooks.reduce_weight_amax, f"weight of {name}")

    weight = make() if cache is None else cache.get([w_NK], make)
    result: Tensor = _QuantMatmul.apply(x_MK, w_NK, weight, spec, backend, amax_hooks, out_dtype or x_MK.dtype, name)
    return result


def check_operands(x_MK: Tensor, w: Tensor, name: str) -> None:
    """Raises ValueError unless x [M, K] fits w [.., N, K] and both have one dtype."""
    if x_MK.ndim != 2 or x_MK.shape[1] != w.shape[-1] or x_MK.dtype != w.dtype:
        raise ValueError(
            f"{name}: input {list(x_MK.shape)} {x_MK.dtype} with weight {list(w.shape)} {w.dtype}; "
            f"expected [M, {w.shape[-1]}] {w.dtype}"
        )
