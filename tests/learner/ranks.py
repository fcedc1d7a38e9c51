"""Two processes that stay alive, because importing megatron takes longer than any test. Each runs what it is sent."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from minite.ports import free_port

TIMEOUT_S = 200


def _serve(pipe: Connection, rank: int, world: int) -> None:
    while (task := pipe.recv()) is not None:
        function, port, args = task
        try:
            pipe.send((function(rank, world, port, *args), None))
        except BaseException:
            pipe.send((None, traceback.format_exc()))
            break
    os._exit(0)  # an orderly end of a process full of torch takes seconds


class Ranks:
    """``run(f, *args)`` calls f(rank, world, port, *args) on every rank and returns the results by rank."""

    def __init__(self, world: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipes, self._processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, rank, world))
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        port = free_port()
        for pipe in self._pipes:
            pipe.send((function, port, args))
        results = []
        for rank, pipe in enumerate(self._pipes):
            if not pipe.poll(TIMEOUT_S):
                raise TimeoutError(f"rank {rank} did not answer in {TIMEOUT_S} s")
            result, error = pipe.recv()
            if error is not None:
                raise AssertionError(f"rank {rank} failed:\n{error}")
            results.append(result)
        return results

    def close(self) -> None:
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            if process.is_alive():
                pipe.send(None)
            process.join(2)
            process.kill()  # a rank may hang in a collective whose partner failed
