"""Rollout engines behind one protocol (engine.py). See README.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

from minite.errors import UserError

if TYPE_CHECKING:  # so that `import minite.sampler` needs no torch
    from minite.config import PrecisionPlan, RunConfig
    from minite.sampler.engine import Engine


def make_engine(config: RunConfig, plan: PrecisionPlan) -> Engine:
    """The engine that ``sampler.kind`` names, on ``sampler.device``. Engines are imported only when asked for."""
    from minite.backends.device import use_cuda
    from minite.sampler.embedded import EmbeddedEngine

    check_engine(config)
    return EmbeddedEngine(config, plan, "cuda" if use_cuda(config.sampler.device) else "cpu")


def check_engine(config: RunConfig) -> None:
    """Raises UserError for a ``sampler.kind`` that cannot run."""
    if config.sampler.kind != "embedded":
        raise UserError(
            f"{config.where('sampler.kind')}: sampler.kind is {config.sampler.kind!r}, which is not built yet; "
            "set -o sampler=embedded"
        )
