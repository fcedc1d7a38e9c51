"""SGLang's HTTP server, spoken to with the methods of sglang.Engine that SglangEngine calls."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.process import BaseProcess
from typing import Any

import psutil
from torch import Tensor

from minite.errors import ProcessDied, UserError
from minite.ports import LOOPBACK

# All that the server answers to: what is called below. Everything else SGLang offers is taken away (server.py).
PATHS = (
    "/generate",
    "/abort_request",
    "/server_info",
    "/begin_weight_update",
    "/end_weight_update",
    "/update_weights_from_tensor",
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/flush_cache",
)
PATIENCE = 60.0  # for killed processes to be gone [s]
SHOWN = 200  # characters of an answer that an error message repeats

Outcome = tuple[bool, str]  # success, message: as sglang.Engine answers


class HttpEngine:
    """A server that runs in ``process`` and listens on ``port`` of loopback.

    Methods do, take and give what those of sglang.Engine do. Each also raises ProcessDied when the server died, does
    not answer within ``timeout`` [s], fails inside or answers what cannot be read: with another server the call may
    succeed. A request that the server refuses is a UserError. May be called from several threads.
    """

    def __init__(
        self, process: BaseProcess, port: int, key: str, timeout: float, serialize: Callable[[Any], list[str]]
    ) -> None:
        self._process, self._port, self._key, self._timeout = process, port, key, timeout
        self._serialize = serialize  # tensors in shared memory -> for each scheduler, what finds them there

    def generate(self, **request: Any) -> list[dict[str, Any]]:
        """One answer to each request."""
        status, body = self._post("/generate", request)
        answers = _json(body)
        if status != 200:
            raise UserError(f"SGLang's server refused to generate (status {status}): {_reason(answers, body)}")
        wanted = len(request["input_ids"])
        if not isinstance(answers, list) or len(answers) != wanted or not all(map(_is_completion, answers)):
            raise self._broken("/generate", f"{_shown(body)}, expected {wanted} completions")
        return answers

    def abort(self, request_id: str) -> None:
        """End a live request, keeping what it has generated."""
        status, body = self._post("/abort_request", {"rid": request_id})
        if status != 200:
            raise self._broken("/abort_request", f"status {status}: {_shown(body)}")

    def get_server_info(self) -> Mapping[str, Any]:
        """``internal_states`` of the schedulers among other things."""
        status, body = self._ask("GET", "/server_info")
        info = _json(body)
        if status != 200 or not isinstance(info, dict) or not isinstance(info.get("internal_states"), list):
            raise self._broken("/server_info", f"status {status}: {_shown(body)}, expected internal_states")
        return info

    def begin_weight_update(self) -> Outcome:
        return self._change("/begin_weight_update", {})

    def end_weight_update(self) -> Outcome:
        return self._change("/end_weight_update", {})

    def update_weights_from_tensor(
        self, named_tensors: Sequence[tuple[str, Tensor]], load_format: str, flush_cache: bool
    ) -> Outcome:
        """The schedulers read tensors where they are, in shared memory or on the GPU; HTTP says where that is."""
        places = self._serialize(named_tensors)
        message = {"serialized_named_tensors": places, "load_format": load_format, "flush_cache": flush_cache}
        return self._change("/update_weights_from_tensor", message)

    def init_weights_update_group(self, **arguments: Any) -> Outcome:
        return self._change("/init_weights_update_group", arguments)

    def update_weights_from_distributed(self, **arguments: Any) -> Outcome:
        return self._change("/update_weights_from_distributed", arguments)

    def flush_cache(self) -> Outcome:
        """Answers in words, which only matter when it fails."""
        status, body = self._post("/flush_cache", {})
        return status == 200, body.decode(errors="replace").strip()

    def shutdown(self) -> None:
        """End the server and all that it has started; returns when their memory is free. May be called again."""
        doomed = _tree(self._process.pid) if self._process.is_alive() else []  # not yet reaped: the number is its own
        for process in doomed:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.join(PATIENCE)
        psutil.wait_procs(doomed, timeout=PATIENCE)

    # -- HTTP ---------------------------------------------------------------------------------------------------------

    def _change(self, path: str, message: Mapping[str, Any]) -> Outcome:
        """SGLang says {success, message} whether it has done what was asked or refuses to."""
        status, body = self._post(path, message)
        answer = _json(body)
        if isinstance(answer, dict) and isinstance(answer.get("success"), bool):
            return answer["success"], str(answer.get("message", ""))
        if status == 200:
            raise self._broken(path, f"{_shown(body)}, expected success or not")
        return False, f"status {status}: {_reason(answer, body)}"

    def _post(self, path: str, message: Mapping[str, Any]) -> tuple[int, bytes]:
        return self._ask("POST", path, json.dumps(message).encode())

    def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        """(status below 500, body) of the answer. A connection for each call: calls come from several threads."""
        headers = {"Authorization": f"Bearer {self._key}", "Content-Type": "application/json"}
        connection = http.client.HTTPConnection(LOOPBACK, self._port, timeout=self._timeout)
        try:
            if not self._process.is_alive():  # its port may be another program's by now, which shall not see the key
                raise ConnectionError
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            status, content = answer.status, answer.read()
        except TimeoutError:
            raise ProcessDied(f"SGLang's server did not answer {path} within {self._timeout:g} s") from None
        except (OSError, http.client.HTTPException) as error:
            raise self._lost(path, error) from None
        finally:
            connection.close()
        if status >= 500:
            raise self._broken(path, f"status {status}: {_shown(content)}")
        return status, content

    def _lost(self, path: str, error: Exception) -> ProcessDied:
        self._process.join(1.0)  # a connection breaks a moment before the process is gone
        if not self._process.is_alive():
            return ProcessDied(f"SGLang's server died (exit code {self._process.exitcode}), noticed at {path}")
        return ProcessDied(f"SGLang's server broke the connection at {path} ({type(error).__name__})")

    def _broken(self, path: str, what: str) -> ProcessDied:
        return ProcessDied(f"SGLang's server answered {path} with {what}")


def _json(body: bytes) -> Any:
    """None for what is no JSON."""
    try:
        return json.loads(body)
    except ValueError:
        return None


def _is_completion(answer: Any) -> bool:
    info = answer.get("meta_info") if isinstance(answer, dict) else None
    return isinstance(info, dict) and isinstance(info.get("finish_reason"), dict) and "output_ids" in answer


def _reason(answer: Any, body: bytes) -> str:
    """What SGLang says is wrong: {"error": {"message": ...}}, {"error": ...}, {"message": ...}."""
    error = answer.get("error", answer) if isinstance(answer, dict) else None
    told = error.get("message") if isinstance(error, dict) else error
    return str(told) if told else _shown(body)


def _shown(body: bytes) -> str:
    return repr(body[:SHOWN].decode(errors="replace")) + (" ..." if len(body) > SHOWN else "")


def _tree(pid: int | None) -> list[psutil.Process]:
    """A process and all under it."""
    root = psutil.Process(pid)
    return [root, *root.children(recursive=True)]
