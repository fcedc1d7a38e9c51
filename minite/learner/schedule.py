"""The learning rate of each update."""

from __future__ import annotations

from minite.config.schema import LearnerConfig


def learning_rate(config: LearnerConfig, step: int, total_steps: int) -> float:
    """Rate of update ``step`` (from 0): linear warm-up over ``warmup_steps``, then linear to ``min_lr`` at the end."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if config.min_lr is None:
        return config.lr
    done = (step - config.warmup_steps) / max(1, total_steps - config.warmup_steps)
    return config.lr + (config.min_lr - config.lr) * min(1.0, done)
