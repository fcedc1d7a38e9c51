"""Ports for the processes of a run."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from minite import ports

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


@pytest.mark.skipif(not RANGE.exists(), reason="needs Linux's list of the ports that it hands out")
def test_the_system_hands_out_no_port_of_ours() -> None:
    first, last = map(int, RANGE.read_text().split())
    assert not any(first <= ports.free_port() <= last for _ in range(50))


def test_a_port_in_use_is_passed_over_and_none_at_all_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server((ports.LOOPBACK, ports.free_port())) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setattr(ports, "_PORTS", range(port, port + 1))
        with pytest.raises(OSError, match="no port"):
            ports.free_port()
    assert ports.free_port() == port
