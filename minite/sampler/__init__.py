"""Rollout engines behind one protocol (engine.py). See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # so that `import minite.sampler` needs no torch
    from minite.config import PrecisionPlan, RunConfig
    from minite.sampler.engine import Engine


def make_engine(config: RunConfig, plan: PrecisionPlan) -> Engine:
    """The engine that ``sampler.kind`` names, on ``sampler.device``. Engines are imported only when asked for."""
    from minite.backends.device import use_cuda

    check_engine(config)
    device = "cuda" if use_cuda(config, "sampler") else "cpu"
    if config.sampler.kind == "sglang":
        from minite.sampler.sglang.engine import SglangEngine

        return SglangEngine(config, plan, device)
    from minite.sampler.embedded import EmbeddedEngine

    return EmbeddedEngine(config, plan, device)


def check_engine(config: RunConfig) -> None:
    """Raises UserError for a ``sampler.kind`` that cannot run this recipe here; imports no engine."""
    if config.sampler.kind == "sglang":
        from minite.backends.device import use_cuda
        from minite.sampler.sglang import launch
        from minite.sampler.sglang.compat import compat

        compat()
        launch.check(config, "cuda" if use_cuda(config, "sampler") else "cpu")
