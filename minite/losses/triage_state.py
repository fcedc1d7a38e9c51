"""The one thing that a correction remembers between steps: what counts as a calm gap in this run."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from minite.config.schema import CorrectionConfig


class TriageState:
    """Running quantile of abs(gap) for ``calm: auto``. Saved with the checkpoint; unused with a fixed calm."""

    def __init__(self) -> None:
        self.calm: float | None = None  # [nats]; None before the first batch

    def observe(self, gap_N: Tensor, config: CorrectionConfig) -> float:
        """Take in the gaps of one global batch and return the calm to use for it. [nats]

        calm <- decay * calm + (1 - decay) * quantile of this batch; the first batch sets it. The quantile is an
        observed value: the smallest abs(gap) with at least ``calm_quantile`` of the finite gaps at or below it.
        The result is at most ``limit_negative``, or a run whose gap grows would call its own tail calm.

        Args: gap_N float64 [N]. A batch without a finite gap changes nothing (and gives 0 if it is the first).
        """
        finite_M = gap_N[gap_N.isfinite()].abs()
        if finite_M.numel():
            rank = min(max(math.ceil(config.calm_quantile * finite_M.numel()), 1), finite_M.numel())
            now = float(finite_M.kthvalue(rank).values)
            decay = config.calm_decay
            self.calm = now if self.calm is None else decay * self.calm + (1 - decay) * now
        return min(self.calm or 0.0, config.limit_negative)

    def state_dict(self) -> dict[str, Any]:
        return {"calm": self.calm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.calm = state["calm"]
