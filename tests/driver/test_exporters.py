"""What leaves a run besides its files: TensorBoard, the endpoint on loopback, Weights & Biases in a folder."""

from __future__ import annotations

import math
import random
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, nullcontext, suppress
from pathlib import Path
from urllib.request import urlopen

import pytest

from minite.config import resolve_plan
from minite.driver import loop
from minite.driver.exporters import (
    MAX_VISITORS,
    PrometheusEndpoint,
    TensorBoard,
    WeightsAndBiases,
    check_exporters,
    prometheus,
    records,
)
from minite.driver.job import Job
from minite.errors import UserError
from minite.ports import free_port
from tests.driver.tiny_run import config


@pytest.fixture
def endpoint() -> Iterator[tuple[PrometheusEndpoint, int]]:
    port = free_port()
    with closing(PrometheusEndpoint(port)) as opened:
        yield opened, port


def scrape(port: int) -> dict[str, str]:
    """Gauges by name, as text."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = [line for line in answer.read().decode().splitlines() if not line.startswith("#")]
    return dict(line.split() for line in lines)


def test_the_endpoint_has_the_newest_value_of_each_metric(endpoint) -> None:
    opened, port = endpoint
    assert scrape(port) == {}
    opened.write(1, {"gap/p0.1": -0.25, "accuracy/heldout": 0.5})
    opened.write(2, {"gap/p0.1": math.nan, "monitor/ess": 1.0})
    expected = {
        "minite_step": "2.0",
        "minite_gap_p0_1": "NaN",
        "minite_accuracy_heldout": "0.5",
        "minite_monitor_ess": "1.0",
    }
    assert scrape(port) == expected


def test_the_endpoint_listens_on_loopback_only(endpoint) -> None:
    opened, port = endpoint
    assert opened._server.server_address == ("127.0.0.1", port)
    hexed = f":{port:04X}"
    rows = [row.split() for name in ("tcp", "tcp6") for row in Path(f"/proc/net/{name}").read_text().splitlines()]
    listening = [row[1] for row in rows if row[3] == "0A" and row[1].endswith(hexed)]
    assert listening == [f"0100007F{hexed}"]


def send(port: int, request: bytes) -> bytes:
    """The whole answer, or as much as came before the server had enough."""
    answer = b""
    with socket.create_connection(("127.0.0.1", port), timeout=10) as visitor, suppress(OSError):
        visitor.sendall(request)
        visitor.shutdown(socket.SHUT_WR)
        while part := visitor.recv(65536):
            answer += part
    return answer


HOSTILE = {
    "noise": random.Random(0).randbytes(4096),
    "TLS": bytes.fromhex("16030100a5") + random.Random(1).randbytes(160),
    "nothing": b"",
    "a path without end": b"GET /" + b"a" * 10_000_000 + b" HTTP/1.1\r\n\r\n",
    "a header without end": b"GET / HTTP/1.1\r\nX: " + b"a" * 10_000_000 + b"\r\n\r\n",
    "headers without end": b"GET / HTTP/1.1\r\n" + b"X: y\r\n" * 100_000 + b"\r\n",
    "a body that never comes": b"POST /metrics HTTP/1.1\r\nContent-Length: 1000000000\r\n\r\n",
    "a file of the machine": b"GET /../../../../etc/passwd HTTP/1.1\r\n\r\n",
    "another method": b"DELETE /metrics HTTP/1.1\r\n\r\n",
}


def test_no_request_hurts_the_endpoint(endpoint, capfd: pytest.CaptureFixture[str]) -> None:
    """Each is answered or dropped, soon; nothing is said on the run's terminal; the next visitor is served."""
    opened, port = endpoint
    opened.write(1, {"reward/mean": 0.5})
    started = time.monotonic()
    answers = {name: send(port, request) for name, request in HOSTILE.items()}
    assert time.monotonic() - started < 8, "well under PATIENCE, let alone a hang"
    assert b"405" in answers["a body that never comes"] and b"405" in answers["another method"]
    assert not any(b"root:" in answer for answer in answers.values())
    assert scrape(port)["minite_reward_mean"] == "0.5"
    assert capfd.readouterr() == ("", "")


def test_slow_visitors_are_few_and_leave(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("minite.driver.exporters._Handler.timeout", 1.0)
    port, before = free_port(), threading.active_count()
    with closing(PrometheusEndpoint(port)) as opened, ExitStack() as visitors:
        opened.write(1, {"reward/mean": 0.5})
        for _ in range(60):
            visitor = visitors.enter_context(socket.create_connection(("127.0.0.1", port), timeout=10))
            visitor.sendall(b"GET / HT")
        time.sleep(0.3)
        assert threading.active_count() - before <= MAX_VISITORS + 1
        time.sleep(1.5)
        assert threading.active_count() - before <= 2, "the slow ones were sent away"
        assert scrape(port)["minite_reward_mean"] == "0.5"
    assert capfd.readouterr().err == ""


def test_a_port_in_use_is_told_and_one_that_was_closed_is_free_again(tmp_path: Path) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        asked = config(tmp_path, f"driver.prometheus_port={port}")
        taken = f"driver.prometheus_port is {port}: address already in use on 127.0.0.1"
        with pytest.raises(UserError, match=taken), prometheus(asked):
            pass
    for _ in range(2):
        with prometheus(asked) as (opened,), records(asked, tmp_path, -1) as others:
            opened.write(0, {"reward/mean": 0.5})
            assert scrape(port)["minite_reward_mean"] == "0.5" and others == []
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tiny.yaml"], "no exporter but the one asked for"


def test_the_endpoint_stays_open_while_a_run_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    run_config = config(tmp_path, f"driver.prometheus_port={port}")
    seen: list[tuple[object, str]] = []

    def attempt(job: Job, folder: object, failed: float, served: list[PrometheusEndpoint]) -> bool:
        served[0].write(len(seen), {})
        seen.append((served[0], scrape(port)["minite_step"]))
        return len(seen) == 3

    monkeypatch.setattr(loop, "cluster", lambda *_: nullcontext())
    monkeypatch.setattr(loop, "_attempt", attempt)
    loop._go(Job(run_config, resolve_plan(run_config), tmp_path), None)
    assert [step for _, step in seen] == ["0.0", "1.0", "2.0"] and len({id(opened) for opened, _ in seen}) == 1


def test_a_missing_package_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_exporters(config(tmp_path))
    monkeypatch.setattr("minite.driver.exporters.find_spec", lambda name: None)
    check_exporters(config(tmp_path))
    with pytest.raises(
        UserError, match=r"driver.prometheus_port is set, but prometheus_client is not .*minite\[prometheus"
    ):
        check_exporters(config(tmp_path, "driver.prometheus_port=9400"))
    with pytest.raises(
        UserError, match=r"driver.wandb is set, but wandb is not installed: pip install 'minite\[wandb\]'"
    ):
        check_exporters(config(tmp_path, "driver.wandb=true"))


def test_a_port_has_bounds(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="driver.prometheus_port is 65536: expected a port from 1 to 65535"):
        config(tmp_path, "driver.prometheus_port=65536")


def test_tensorboard_holds_each_step_once_after_a_resume(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for after_step, steps in ((-1, range(6)), (3, range(4, 8))):
        with closing(TensorBoard(tmp_path / "tensorboard", after_step)) as board:
            for step in steps:
                board.write(step, {"reward/mean": step / 8})
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/mean")] == [(i, i / 8) for i in range(8)]


def test_wandb_stays_on_this_machine_unless_the_user_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is not installed (100 MB, no part of the tests' environment)")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with closing(WeightsAndBiases(config(tmp_path), tmp_path, -1)) as board:
        board.write(1, {"reward/mean": 0.5, "gap/p1": math.nan})
        assert board._run.offline and board._run.name == tmp_path.name
        assert board._run.config["name"] == "tiny"
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    assert list(folder.glob("*.wandb"))
