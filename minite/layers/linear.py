"""A linear module whose weight and input are quantized as the plan says."""

from __future__ import annotations

from torch import Tensor, nn

from minite.backends.base import Backend
from minite.errors import UserError
from minite.layers.matmul import NO_HOOKS, AmaxHooks, LinearSpecLike, quant_matmul
from minite.layers.weight_cache import WeightCache


def check_supported(op: str, spec: LinearSpecLike, backend: Backend, name: str) -> None:
    """Raises UserError when the backend cannot compute ``op`` ("gemm", "grouped_gemm") on the operands of ``spec``."""
    reason = backend.unsupported_reason(op, spec.weight, spec.input)
    if reason is not None:
        raise UserError(
            f"{name}: backend {backend.name} has no {op} of weight {spec.weight} with input {spec.input}: {reason}; "
            "set precision.backend: auto, or choose another format for this module"
        )


class QuantLinear(nn.Module):
    """y = x @ weight.T with the operands of ``spec``; no bias. The weight stays in the storage dtype.

    weight: [N, K] parameter, initialised by the caller. spec: a LinearSpec or a plan entry. name: for error messages.
    Raises UserError when the backend does not support the operands.
    """

    def __init__(
        self,
        weight: nn.Parameter,
        spec: LinearSpecLike,
        backend: Backend,
        *,
        amax_hooks: AmaxHooks = NO_HOOKS,
        name: str = "linear",
    ) -> None:
        super().__init__()
        check_supported("gemm", spec, backend, name)
        self.weight = weight
        self.spec, self.backend, self.amax_hooks, self.name = spec, backend, amax_hooks, name
        self.cache = WeightCache()

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N], the dtype of x."""
        x_MK = x.reshape(-1, x.shape[-1])
        y_MN = quant_matmul(x_MK, self.weight, self.spec, self.backend, self.cache, self.amax_hooks, name=self.name)
        return y_MN.view(*x.shape[:-1], self.weight.shape[0])

    def extra_repr(self) -> str:
        n, k = self.weight.shape
        s = self.spec
        return f"{self.name}: n={n} k={k} weight={s.weight} input={s.input} dgrad={s.dgrad} wgrad={s.wgrad}"
