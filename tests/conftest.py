"""Settings of every test run. They must be in place before torch is imported, here and in the processes tests start."""

from __future__ import annotations

import os

import pytest

# Compiling megatron's small fused functions costs 2-13 s a process and changes no loss: see learner/README.md.
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
# Tests run two at a time on two cores; one thread each is faster and keeps summation orders the same everywhere.
os.environ.setdefault("OMP_NUM_THREADS", "1")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip, with the reason, GPU tests where there is no GPU, and long compilations that were not asked for."""
    if "nvcc_gemm" not in config.option.markexpr:
        for item in items:
            if item.get_closest_marker("nvcc_gemm"):
                item.add_marker(pytest.mark.skip(reason="compiles for many minutes; only with -m nvcc_gemm"))
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if torch.cuda.is_available():
        return
    for item in gpu_items:
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
