"""Learning rates by hand."""

from __future__ import annotations

import pytest

from minite.config.schema import LearnerConfig
from minite.learner.schedule import learning_rate


@pytest.mark.parametrize(
    "config, expected",
    [
        (LearnerConfig(lr=1.0), [1.0] * 6),
        (LearnerConfig(lr=1.0, warmup_steps=2), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (LearnerConfig(lr=1.0, min_lr=0.2), [1.0, 0.8, 0.6, 0.4, 0.2, 0.2]),
        (LearnerConfig(lr=1.0, min_lr=0.2, warmup_steps=2), [0.5, 1.0, 1.0, 0.6, 0.2, 0.2]),
        (LearnerConfig(lr=1.0, min_lr=0.2, warmup_steps=4), [0.25, 0.5, 0.75, 1.0, 1.0, 0.2]),
    ],
)
def test_learning_rate_of_each_update(config, expected):
    assert [learning_rate(config, step, total_steps=4) for step in range(6)] == pytest.approx(expected)
