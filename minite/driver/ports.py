"""A port of this machine that nobody listens on."""

from __future__ import annotations

import random
import socket

# Below the ports that Linux hands out by itself, so that nothing takes one between the look at it and its use.
_PORTS = range(20_000, 32_768)


def free_port() -> int:
    """One that is free now. OSError when there is none."""
    draw = random.SystemRandom()
    for port in draw.sample(_PORTS, len(_PORTS)):
        try:
            with socket.create_server(("127.0.0.1", port)):
                return port
        except OSError:
            continue
    raise OSError(f"no port from {_PORTS.start} to {_PORTS.stop - 1} is free on 127.0.0.1")
