"""Rollout engines behind one protocol (engine.py). See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minite.errors import UserError

if TYPE_CHECKING:  # so that `import minite.sampler` needs no torch
    from minite.config import PrecisionPlan, RunConfig
    from minite.sampler.engine import Engine


def make_engine(config: RunConfig, plan: PrecisionPlan) -> Engine:
    """The engine that ``sampler.kind`` names, on ``sampler.device``. Engines are imported only when asked for."""
    if config.sampler.kind == "embedded":
        from minite.backends.device import use_cuda
        from minite.sampler.embedded import EmbeddedEngine

        return EmbeddedEngine(config, plan, "cuda" if use_cuda(config.sampler.device) else "cpu")
    raise UserError(f"sampler.kind is {config.sampler.kind!r}, which is not built yet; expected embedded")
