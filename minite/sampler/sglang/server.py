"""SGLang's HTTP server as a process of this one: on loopback, behind a key, and gone when this process is.

sglang must not be imported at the top of this module: the new process imports it to learn what to run.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import secrets
import signal
import threading
import time
from multiprocessing.process import BaseProcess
from typing import Any

import psutil

from minite.config import env
from minite.errors import ProcessDied
from minite.ports import LOOPBACK, free_port
from minite.sampler.sglang import cpu_stand_ins
from minite.sampler.sglang.client import PATHS, HttpEngine
from minite.sampler.sglang.processes import CHILDREN, require_plugin

LOOK = 0.25  # between two looks whether the server listens [s]


def make_server(arguments: dict[str, Any], timeout: float) -> HttpEngine:
    """A running server with the launch options of sglang.Engine. Raises ProcessDied when it ends while it starts, or
    does not listen within ``timeout`` [s], which is also the limit of each later call."""
    cpu_stand_ins.install()
    from sglang.srt.utils import MultiprocessingSerializer

    require_plugin()
    ranks, key, port = arguments["tp_size"], secrets.token_urlsafe(32), free_port()
    served = {"host": LOOPBACK, "port": port, "api_key": key, "skip_server_warmup": True}  # there are no weights yet
    process = multiprocessing.get_context("spawn").Process(target=serve, args=(arguments | served,))
    process.start()  # the key travels in a pipe; no command line and no environment has it
    engine = HttpEngine(
        process,
        port,
        key,
        timeout,
        lambda tensors: [MultiprocessingSerializer.serialize(tensors, output_str=True) for _ in range(ranks)],
    )
    atexit.register(engine.shutdown)
    try:
        _wait(process, port, timeout)
    except BaseException:
        engine.shutdown()
        raise
    return engine


def _wait(process: BaseProcess, port: int, timeout: float) -> None:
    """Until the process itself listens: another program on that port shall be sent nothing."""
    limit = time.monotonic() + timeout
    while not _listens(process.pid, port):
        if not process.is_alive():
            raise ProcessDied(f"SGLang's server ended while it started (exit code {process.exitcode})")
        if time.monotonic() > limit:
            raise ProcessDied(f"SGLang's server did not start within {timeout:g} s")
        time.sleep(LOOK)


def _listens(pid: int | None, port: int) -> bool:
    try:
        sockets = psutil.Process(pid).net_connections("tcp")
    except psutil.NoSuchProcess:
        return False
    return any(s.status == psutil.CONN_LISTEN and s.laddr == (LOOPBACK, port) for s in sockets)


def serve(arguments: dict[str, Any]) -> None:
    """The server's process, until it is killed."""
    end_with_parent()
    env.keep_loopback_direct()  # SGLang asks its own server with a library that heeds proxies, and names the key
    cpu_stand_ins.install()
    from sglang.srt.entrypoints import http_server
    from sglang.srt.server_args import ServerArgs

    require_plugin()
    routes = http_server.app.router.routes
    routes[:] = [route for route in routes if getattr(route, "path", None) in PATHS]
    http_server.launch_server(ServerArgs(**arguments), **CHILDREN)


def end_with_parent() -> None:
    """Kill this process when the one that started it ends, however that ends. SGLang's processes follow this one."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def follow() -> None:
        parent.join()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=follow, name="end_with_parent", daemon=True).start()
