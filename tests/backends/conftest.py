"""Fixtures of the backends' tests."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """torch.empty comes filled with NaN or the largest integer, so what nobody writes shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def fused():
    """The fused stretches of the backend triton."""
    from minite.backends.triton.backend import TritonBackend

    return TritonBackend(strict=False).fused
