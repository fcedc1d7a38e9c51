"""What emulated W4A4 costs against BF16 on this machine: forward passes of one linear, timed side by side.

`python -m minite.backends.bench` prints the table; `minite bench step` includes it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from minite.backends.registry import get_backend

# Largest first: the C allocator learns from it to keep pages, as in a run, instead of returning them after every call.
SHAPES_MNK = ((4096, 2048, 512), (4096, 512, 512), (1024, 512, 512))
BOUND = 3.0  # W4A4 forward may cost at most this many BF16 forwards on a CPU at hidden 512


@dataclass(frozen=True)
class Row:
    """Median times of one shape. [ms]"""

    mnk: tuple[int, int, int]
    backend: str
    torch_bf16: float  # torch.nn.functional.linear on BF16 tensors
    backend_bf16: float  # the backend's own BF16 GEMM
    quantize: float  # the activations alone
    w4a4: float  # quantize and GEMM, weight prepared

    @property
    def ratio(self) -> float:
        """W4A4 over torch's BF16 linear."""
        return self.w4a4 / self.torch_bf16

    @property
    def ratio_backend(self) -> float:
        """W4A4 over the backend's BF16 GEMM."""
        return self.w4a4 / self.backend_bf16


def measure(shape_MNK: tuple[int, int, int], *, backend: str = "auto", device: str = "cpu", repeats: int = 9) -> Row:
    """Time one shape in a backend. The runs take turns, forwards then backwards, so that drift hits all alike."""
    m, n, k = shape_MNK
    here = get_backend(backend, device=device, strict=False)
    generator = torch.Generator().manual_seed(0)
    x_MK = torch.randn(m, k, generator=generator).to(device, torch.bfloat16)
    w_NK = torch.randn(n, k, generator=generator).to(device, torch.bfloat16)
    plain, packed = here.prepare(w_NK), here.prepare(here.quantize(w_NK, "nvfp4_1d"))
    runs: dict[str, Callable[[], object]] = {
        "torch_bf16": lambda: torch.nn.functional.linear(x_MK, w_NK),
        "backend_bf16": lambda: here.gemm(x_MK, plain, torch.bfloat16),
        "quantize": lambda: here.quantize(x_MK, "nvfp4_row"),
        "w4a4": lambda: here.gemm(here.quantize(x_MK, "nvfp4_row"), packed, torch.bfloat16),
    }
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        order = list(runs) if turn % 2 else list(reversed(runs))
        for name in order:
            elapsed = _timed(runs[name], device)
            if turn:  # the first turn only warms up
                times[name].append(elapsed)
    return Row(shape_MNK, here.name, **{name: statistics.median(t) for name, t in times.items()})


def table(rows: list[Row]) -> str:
    """The rows as text, with the ratio that BOUND speaks of."""
    lines = ["M x N x K          BF16 torch  BF16 here  quantize   W4A4 [ms]  W4A4/BF16 torch  W4A4/BF16 here"]
    for row in rows:
        shape = " x ".join(map(str, row.mnk))
        times = f"{row.torch_bf16:10.2f} {row.backend_bf16:10.2f} {row.quantize:9.2f} {row.w4a4:11.2f}"
        lines.append(f"{shape:18} {times} {row.ratio:16.2f} {row.ratio_backend:15.2f}")
    worst = max(row.ratio for row in rows)
    verdict = "within" if worst <= BOUND else "ABOVE"
    lines.append(f"backend {', '.join(sorted({row.backend for row in rows}))}")
    lines.append(f"worst W4A4 / BF16 torch: {worst:.2f}, {verdict} the bound of {BOUND:g}")
    return "\n".join(lines)


def _timed(run: Callable[[], object], device: str) -> float:
    start = time.perf_counter()
    run()
    if device != "cpu":
        torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start)


if __name__ == "__main__":
    for name in ("auto", "reference"):
        print(table([measure(shape, backend=name) for shape in SHAPES_MNK]))
