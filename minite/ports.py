"""A port of this machine that nobody listens on."""

from __future__ import annotations

import random
import socket

LOOPBACK = "127.0.0.1"
# Below the ports that Linux hands out by itself, so that nothing takes one between the look at it and its use.
_PORTS = range(20_000, 32_768)


def free_port() -> int:
    """One that is free now. OSError when there is none."""
    first = random.SystemRandom().randrange(len(_PORTS))
    for port in (*_PORTS[first:], *_PORTS[:first]):
        try:
            with socket.create_server((LOOPBACK, port)):
                return port
        except OSError:
            continue
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free on {LOOPBACK}")
