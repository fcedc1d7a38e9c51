"""A router for SGLang engines that sends every request on as it came: pass_through_router.py PORT

slime's image has a build of sglang-router of its own. The one on PyPI drops fields it does not know, among them
return_routed_experts, without which slime's router replay finds no experts. Where slime's build is missing, this
stands in for it: slime takes it by --sglang-router-ip and --sglang-router-port. It has no cache awareness, no health
checks and no streaming, so no speed is measured through it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import threading
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

HOST = "127.0.0.1"
PATIENCE = 600.0  # for the answer of an engine [s]
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever proxy the environment names


class Router(ThreadingHTTPServer):
    """Engines by id; requests go to them in turn."""

    request_queue_size = 1024  # a rollout asks for all its responses at once
    daemon_threads = True

    def __init__(self, port: int) -> None:
        super().__init__((HOST, port), Handler)
        self.workers: dict[str, str] = {}
        self._lock, self._ids, self._turn = threading.Lock(), itertools.count(), itertools.count()

    def add(self, url: str) -> str:
        with self._lock:
            name = str(next(self._ids))
            self.workers[name] = url.rstrip("/")
        return name

    def remove(self, name: str) -> bool:
        with self._lock:
            return self.workers.pop(name, None) is not None

    def next(self) -> str | None:
        """Address of the engine whose turn it is; None when there is none."""
        with self._lock:
            urls = list(self.workers.values())
            return urls[next(self._turn) % len(urls)] if urls else None


class Handler(BaseHTTPRequestHandler):
    server: Router
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        if self.path == "/workers":
            workers = [{"id": name, "url": url} for name, url in self.server.workers.items()]
            self._answer(200, json.dumps({"workers": workers}).encode())
        else:
            self._pass_on()

    def do_POST(self) -> None:
        if self.path == "/workers":
            self._answer(202, json.dumps({"worker_id": self.server.add(json.loads(self._body())["url"])}).encode())
        else:
            self._pass_on()

    def do_DELETE(self) -> None:
        found = self.server.remove(self.path.removeprefix("/workers/"))
        self._answer(202 if found else 404, b"{}")

    def _pass_on(self) -> None:
        body = self._body()  # read in any case: what is left of it would be taken for the next request
        engine = self.server.next()
        if engine is None:
            self._answer(503, b'{"error": "no engine is registered"}')
            return
        request = urllib.request.Request(engine + self.path, data=body or None, method=self.command)
        request.add_header("Content-Type", self.headers.get("Content-Type", "application/json"))
        try:
            with DIRECT.open(request, timeout=PATIENCE) as answer:
                self._answer(answer.status, answer.read())
        except urllib.error.HTTPError as error:
            self._answer(error.code, error.read())
        except OSError as error:
            self._answer(502, json.dumps({"error": f"{engine}: {error}"}).encode())

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Of thousands of requests none needs a line."""


def main() -> None:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("port", type=int, help="on loopback")
    router = Router(parser.parse_args().port)
    print(f"pass-through router at {HOST}:{router.server_port}", flush=True)
    router.serve_forever()


if __name__ == "__main__":
    sys.exit(main())
