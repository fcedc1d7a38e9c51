"""Median GPU times of functions that take turns, so that clock drift and neighbours hit all of them alike."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

Run = Callable[[], object]


def graphed(run: Run) -> Run:
    """``run`` captured as a CUDA graph: replays cost no host time, as in a long queue of work."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def medians(runs: dict[str, Run], repeats: int = 20, graphs: dict[str, Run] | None = None) -> dict[str, float]:
    """Median milliseconds of each run, in forward order and backward order by turns. The L2 cache is flushed before.

    graphs: replays of graphs captured elsewhere, beside those of ``runs``.
    """
    graphs = {name: graphed(run) for name, run in runs.items()} | (graphs or {})
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    times: dict[str, list[float]] = {name: [] for name in graphs}
    for turn in range(repeats + 1):
        for name in list(graphs) if turn % 2 else list(reversed(graphs)):
            elapsed = _timed(graphs[name], flush)
            if turn:  # the first turn only warms up
                times[name].append(elapsed)
    return {name: statistics.median(t) for name, t in times.items()}


def copy_bandwidth() -> float:
    """Bytes read plus written per second [TB/s] by a device-to-device copy of 4 GiB."""
    source = torch.empty(2**30, dtype=torch.float32, device="cuda")
    target = torch.empty_like(source)
    flush = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    # not as a graph: there a copy is a node for the copy engine, which is slower than the kernel that torch launches
    ms = statistics.median(_timed(lambda: target.copy_(source), flush) for _ in range(10))
    return 2 * source.nbytes / ms / 1e9


def _timed(run: Run, flush: Tensor) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
