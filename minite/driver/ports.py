"""A port of this machine that nobody listens on."""

from __future__ import annotations

import socket


def free_port() -> int:
    """One that was free a moment ago; another process may take it first."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]
