"""How fast a CPU quantizes and reads NVFP4, beside a copy of the same tensor by one thread: `minite bench quantize`.

GB/s counts the bytes of the input and of the result once each, as a copy's are counted, also where a quantizer reads
its input twice (an outer scale for the whole tensor needs the amax of all of it first).
"""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from minite.backends.reference import ReferenceBackend
from minite.backends.registry import explain, get_backend
from minite.formats import QTensor

SHAPE_MK = (3840, 2048)  # float32 values stay below 32 MiB: the C allocator returns larger blocks after every call
BOUND = 0.25  # 1D quantize on a CPU: at least this part of the copy's GB/s
BOUND_CASES = ("quantize nvfp4_1d", "quantize nvfp4_row")
FORMATS = ("nvfp4_1d", "nvfp4_row", "nvfp4_2d", "nvfp4_1d_4o6")


@dataclass(frozen=True)
class Rate:
    """Median time of one operation of one backend."""

    operation: str
    backend: str
    ms: float
    gb_per_s: float
    of_copy: float  # GB/s over the copy's
    copy_time: float  # time of the copy over the time


def measure(shape_MK: tuple[int, int] = SHAPE_MK, *, turns: int = 9) -> list[Rate]:
    """Time every operation with one thread; they take turns, forwards then backwards. The first row is the copy."""
    torch.set_num_threads(1)
    x_MK = torch.randn(shape_MK, generator=torch.Generator().manual_seed(0)).bfloat16()
    target_MK = torch.empty_like(x_MK)
    runs: dict[tuple[str, str], tuple[Callable[[], object], int]] = {
        ("copy", "torch"): (lambda: target_MK.copy_(x_MK), 2 * x_MK.nbytes)
    }
    for name in (v.name for v in explain(device="cpu", strict=False) if v.refusal is None):
        backend = get_backend(name, device="cpu", strict=False)
        assert isinstance(backend, ReferenceBackend)
        runs |= {(what, name): run for what, run in _runs(backend, x_MK).items()}
    times: dict[tuple[str, str], list[float]] = {key: [] for key in runs}
    for turn in range(turns + 1):
        for key in list(runs) if turn % 2 else list(reversed(runs)):
            start = time.thread_time()
            runs[key][0]()
            if turn:  # the first turn compiles and warms up
                times[key].append(time.thread_time() - start)
    seconds = {key: statistics.median(t) for key, t in times.items()}
    rates = {key: runs[key][1] / seconds[key] / 1e9 for key in runs}
    copy = ("copy", "torch")
    return [
        Rate(*key, 1e3 * seconds[key], rates[key], rates[key] / rates[copy], seconds[copy] / seconds[key])
        for key in runs
    ]


def _runs(backend: ReferenceBackend, x_MK: Tensor) -> dict[str, tuple[Callable[[], object], int]]:
    """What is timed, and its bytes."""
    x32_MK = x_MK.float()
    runs: dict[str, tuple[Callable[[], object], int]] = {}
    for how in FORMATS:
        q = backend.quantize(x_MK, how)
        assert isinstance(q, QTensor)
        runs[f"quantize {how}"] = (lambda how=how: backend.quantize(x_MK, how), x_MK.nbytes + q.nbytes)
        if how == FORMATS[0]:
            runs[f"quantize {how}, FP32"] = (lambda: backend.quantize(x32_MK, FORMATS[0]), x32_MK.nbytes + q.nbytes)
            runs["dequantize, to BF16"] = (lambda q=q: backend.dequantize(q, torch.bfloat16), q.nbytes + x_MK.nbytes)
            runs["codes x scales, to FP32"] = (lambda q=q: backend.prepare(q), q.nbytes + x32_MK.nbytes)
    return runs


def table(rates: list[Rate]) -> str:
    """The rates as text, with the verdict that BOUND speaks of."""
    lines = [f"{'operation':28} {'backend':10} {'ms':>8} {'GB/s':>7} {'of copy':>8} {'copy ms / ms':>13}"]
    for r in rates:
        figures = f"{r.ms:8.2f} {r.gb_per_s:7.2f} {r.of_copy:8.1%} {r.copy_time:13.1%}"
        lines.append(f"{r.operation:28} {r.backend:10} {figures}")
    judged = [r for r in rates if r.backend == rates[1].backend and r.operation in BOUND_CASES]
    worst = min(judged, key=lambda r: r.of_copy)
    verdict = "within" if worst.of_copy >= BOUND else "BELOW"
    share = f"{worst.of_copy:.1%} of the copy"
    lines.append(f"worst 1D quantize: {share} ({worst.backend}), {verdict} the bound of {BOUND:.0%}")
    return "\n".join(lines)


def machine() -> str:
    """The CPU's own name, its load and the versions that matter."""
    listed = Path("/proc/cpuinfo")
    lines = listed.read_text(encoding="utf-8").splitlines() if listed.exists() else []
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    return f"{cpu}, {cores} cores, load {load:.1f}; torch {torch.__version__}, 1 thread"
