"""The linears of a layer's experts as one module."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from minite.backends.base import Backend
from minite.layers.grouped_matmul import quant_grouped_matmul
from minite.layers.linear import check_supported
from minite.layers.matmul import NO_HOOKS, AmaxHooks, LinearSpecLike
from minite.layers.weight_cache import WeightCache


class QuantGroupedLinear(nn.Module):
    """y_e = x_e @ weight_e.T for the rows of each expert, with the operands of ``spec``; no bias.

    weights: one [E, N, K] parameter (kept as ``weight``) or E parameters [N, K] (kept as ``weight0`` ... as
    megatron names them), initialised by the caller. Raises UserError when the backend does not support the operands.
    """

    def __init__(
        self,
        weights: nn.Parameter | Sequence[nn.Parameter],
        spec: LinearSpecLike,
        backend: Backend,
        *,
        amax_hooks: AmaxHooks = NO_HOOKS,
        name: str = "experts",
    ) -> None:
        super().__init__()
        check_supported("grouped_gemm", spec, backend, name)
        named = {"weight": weights} if isinstance(weights, Tensor) else {f"weight{e}": w for e, w in enumerate(weights)}
        for key, parameter in named.items():
            self.register_parameter(key, parameter)
        self._names = tuple(named)
        self.spec, self.backend, self.amax_hooks, self.name = spec, backend, amax_hooks, name
        self.cache = WeightCache()

    def weights(self) -> Tensor | list[Tensor]:
        """What the constructor was given."""
        parts = [self.get_parameter(key) for key in self._names]
        return parts[0] if parts[0].ndim == 3 else list[Tensor](parts)

    def forward(self, x_RK: Tensor, rows_E: Tensor) -> Tensor:
        """x [R, K] sorted by expert, rows_E int64 [E] -> [R, N], the dtype of x."""
        return quant_grouped_matmul(
            x_RK, self.weights(), rows_E, self.spec, self.backend, self.cache, self.amax_hooks, name=self.name
        )

    def extra_repr(self) -> str:
        s = self.spec
        return f"{self.name}: weight={s.weight} input={s.input} dgrad={s.dgrad} wgrad={s.wgrad}"
