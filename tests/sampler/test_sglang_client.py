"""What the client of SGLang's HTTP server makes of every answer, and the end of a server's process: no SGLang here, a
stand-in answers."""

from __future__ import annotations

import json
import multiprocessing
import os
import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.connection import Connection
from types import SimpleNamespace

import psutil
import pytest
import torch

from minite.config import env
from minite.errors import ProcessDied, UserError
from minite.ports import LOOPBACK, free_port
from minite.sampler.sglang.client import PATHS, HttpEngine
from minite.sampler.sglang.compat import checked
from minite.sampler.sglang.server import _wait, end_with_parent
from minite.sync.errors import SyncError

KEY, COMPLETION = "k" * 43, {"output_ids": [1], "meta_info": {"finish_reason": {"type": "stop"}}}
ALIVE = SimpleNamespace(is_alive=lambda: True, join=lambda timeout: None, exitcode=None, pid=os.getpid())
DEAD = SimpleNamespace(is_alive=lambda: False, join=lambda timeout: None, exitcode=-9, pid=None)
TWO = {"input_ids": [[1], [2]], "sampling_params": [{}, {}]}


@contextmanager
def server(status: int, body: bytes | str | None, process: object = ALIVE, timeout: float = 20.0, cut: int = 0):
    """A client of a server that answers everything alike, and what it was asked. None: never; ``cut``: bytes that an
    answer lacks."""
    asked, done = [], threading.Event()
    body = body.encode() if isinstance(body, str) else body

    class Handler(BaseHTTPRequestHandler):
        def answer(self) -> None:
            length = int(self.headers.get("Content-Length", 0))
            content = json.loads(self.rfile.read(length) or b"null")
            asked.append((self.command, self.path, content, self.headers["Authorization"]))
            if body is None:
                done.wait()
                return
            self.send_response(status)
            self.send_header("Content-Length", str(len(body) + cut))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = answer

        def log_message(self, *args: object) -> None:
            pass

    stand_in = ThreadingHTTPServer((LOOPBACK, 0), Handler)
    thread = threading.Thread(target=stand_in.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield HttpEngine(process, stand_in.server_port, KEY, timeout, lambda tensors: [repr(tensors)] * 2), asked
    finally:
        done.set()
        stand_in.shutdown()
        thread.join()
        stand_in.server_close()


CALLS = {
    "/generate": lambda client: client.generate(**TWO),
    "/abort_request": lambda client: client.abort("r1"),
    "/server_info": lambda client: client.get_server_info(),
    "/begin_weight_update": lambda client: client.begin_weight_update(),
    "/end_weight_update": lambda client: client.end_weight_update(),
    "/update_weights_from_tensor": lambda client: client.update_weights_from_tensor([], "loader", False),
    "/init_weights_update_group": lambda client: client.init_weights_update_group(rank_offset=1),
    "/update_weights_from_distributed": lambda client: client.update_weights_from_distributed(names=["data"]),
    "/flush_cache": lambda client: client.flush_cache(),
}
EVERY = pytest.mark.parametrize("path", PATHS)


def test_each_call_says_what_it_must_and_shows_the_key():
    answer = json.dumps({"success": True, "message": "done"})
    with server(200, answer) as (client, asked):
        tensors = [("data", torch.ones(2))]
        assert client.update_weights_from_tensor(tensors, load_format="loader", flush_cache=False) == (True, "done")
        assert checked(client.end_weight_update, "end_weight_update") == "done"
        client.abort("r1")
        assert client.flush_cache()[0]
    sent = {"serialized_named_tensors": [repr(tensors)] * 2, "load_format": "loader", "flush_cache": False}
    assert asked[0] == ("POST", "/update_weights_from_tensor", sent, f"Bearer {KEY}")
    assert asked[2][1:3] == ("/abort_request", {"rid": "r1"})
    assert {key for *_, key in asked} == {f"Bearer {KEY}"} and KEY not in repr(client)
    with server(200, json.dumps([COMPLETION] * 2)) as (client, asked):
        assert client.generate(**TWO) == [COMPLETION] * 2
    assert asked[0][:3] == ("POST", "/generate", TWO)
    with server(200, '{"internal_states": [{"minite": []}]}') as (client, asked):
        assert client.get_server_info() == {"internal_states": [{"minite": []}]}
    assert asked[0][:2] == ("GET", "/server_info") and CALLS.keys() == set(PATHS)


@EVERY
def test_a_failure_inside_the_server_is_named(path):
    with (
        server(500, "Internal Server Error") as (client, _),
        pytest.raises(ProcessDied, match=f"^SGLang's server answered {path} with status 500: 'Internal Server Error'$"),
    ):
        CALLS[path](client)


@EVERY
def test_an_answer_that_does_not_come(path):
    with (
        server(200, None, timeout=0.2) as (client, _),
        pytest.raises(ProcessDied, match=f"^SGLang's server did not answer {path} within 0.2 s$"),
    ):
        CALLS[path](client)


@EVERY
def test_a_server_that_died_is_asked_nothing(path):
    """Its port may be another program's by then."""
    with (
        server(200, "{}", process=DEAD) as (client, asked),
        pytest.raises(ProcessDied, match=rf"^SGLang's server died \(exit code -9\), noticed at {path}$"),
    ):
        CALLS[path](client)
    assert not asked


@EVERY
def test_a_connection_that_is_refused_or_breaks(path):
    client = HttpEngine(ALIVE, free_port(), KEY, 5.0, list)
    with pytest.raises(ProcessDied, match=rf"broke the connection at {path} \(ConnectionRefusedError\)"):
        CALLS[path](client)
    with (
        server(200, '{"success": true', cut=9) as (client, _),
        pytest.raises(ProcessDied, match=rf"broke the connection at {path} \(IncompleteRead\)"),
    ):
        CALLS[path](client)


@pytest.mark.parametrize("body", ["", "{", "null", "[]", '{"success": "yes"}', '{"success": 1}', "é" * 999])
@pytest.mark.parametrize("path", [path for path in PATHS if path not in ("/flush_cache", "/abort_request")])
def test_an_answer_that_is_none_is_shown_and_nothing_is_taken_for_success(path, body):
    with server(200, body) as (client, _), pytest.raises(ProcessDied, match=f"answered {path} with .*'") as caught:
        CALLS[path](client)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    "answers",
    [[COMPLETION], [COMPLETION] * 3, [COMPLETION, {}], [COMPLETION, None], [COMPLETION, COMPLETION | {"meta_info": 3}],
     {"0": COMPLETION}, [COMPLETION, {"meta_info": COMPLETION["meta_info"]}]],
)  # fmt: skip
def test_completions_are_as_many_as_requests_and_whole(answers):
    with (
        server(200, json.dumps(answers)) as (client, _),
        pytest.raises(ProcessDied, match=r"answered /generate with .*, expected 2 completions"),
    ):
        client.generate(**TWO)


@pytest.mark.parametrize("status", [200, 400])
def test_success_false_is_refused_as_sglang_engine_refuses_it(status):
    with server(status, '{"success": false, "message": "no session"}') as (client, _):
        for name in ("begin_weight_update", "end_weight_update"):
            with pytest.raises(SyncError, match=f"^SGLang refused {name}: no session$"):
                checked(getattr(client, name), name)
        with pytest.raises(SyncError, match=r"^SGLang refused update: no session$"):
            checked(client.update_weights_from_tensor, "update", named_tensors=[], load_format="", flush_cache=False)


@pytest.mark.parametrize(
    ("body", "told"),
    [('{"error": {"message": "too long"}}', "too long"), ('{"error": "Unauthorized"}', "Unauthorized"),
     ('{"message": "bad"}', "bad"), ("no JSON", "'no JSON'")],
)  # fmt: skip
def test_a_refusal_repeats_the_reason(body, told):
    with server(400, body) as (client, _):
        with pytest.raises(UserError, match=rf"^SGLang's server refused to generate \(status 400\): {told}$"):
            client.generate(**TWO)
        success, message = client.begin_weight_update()
        assert not success and message == f"status 400: {told}"
    with server(400, "2 requests run") as (client, _), pytest.raises(SyncError, match="flush_cache: 2 requests run"):
        checked(client.flush_cache, "flush_cache")


def test_an_abort_that_fails_is_told():
    """Its answer says nothing else."""
    with server(400, "") as (client, _), pytest.raises(ProcessDied, match="answered /abort_request with status 400"):
        client.abort("r1")


def sleep(seconds: float) -> None:
    time.sleep(seconds)


def test_a_server_that_ends_or_hangs_while_it_starts_and_a_port_of_somebody_else():
    spawn = multiprocessing.get_context("spawn")
    gone = spawn.Process(target=os._exit, args=(3,))
    gone.start()
    with pytest.raises(ProcessDied, match=r"^SGLang's server ended while it started \(exit code 3\)$"):
        _wait(gone, free_port(), 60.0)
    hangs = spawn.Process(target=sleep, args=(600,))
    hangs.start()
    with server(200, "{}") as (client, asked):  # its port is open, but it is not the process's own
        with pytest.raises(ProcessDied, match=r"^SGLang's server did not start within 0.5 s$"):
            _wait(hangs, client._port, 0.5)
        assert not asked
    HttpEngine(hangs, 1, KEY, 1.0, list).shutdown()
    assert hangs.exitcode == -9
    HttpEngine(hangs, 1, KEY, 1.0, list).shutdown()  # a second time there is nothing to do


def follower(told: Connection) -> None:
    end_with_parent()
    told.send(os.getpid())
    time.sleep(600)


def starter(told: Connection) -> None:
    """A sampler's process and, in its place, the server's."""
    multiprocessing.get_context("spawn").Process(target=follower, args=(told,)).start()
    time.sleep(600)


def test_the_server_goes_when_the_samplers_process_is_killed():
    spawn = multiprocessing.get_context("spawn")
    ours, theirs = spawn.Pipe()
    sampler = spawn.Process(target=starter, args=(theirs,))
    sampler.start()
    try:
        assert ours.poll(120)
        served = psutil.Process(ours.recv())
        assert served.is_running() and served.ppid() == sampler.pid
    finally:
        sampler.kill()
        sampler.join()
    assert not psutil.wait_procs([served], timeout=60)[1]


def test_no_proxy_is_asked_for_this_machine(monkeypatch):
    for given, expected in (
        ({}, "127.0.0.1"),
        ({"NO_PROXY": "a.org", "no_proxy": "a.org"}, "a.org,127.0.0.1"),
        ({"NO_PROXY": "a.org"}, "a.org,127.0.0.1"),
        ({"no_proxy": "*"}, "*"),
    ):
        monkeypatch.setattr(env.os, "environ", given)
        env.keep_loopback_direct()
        assert given == {"NO_PROXY": expected, "no_proxy": expected}
