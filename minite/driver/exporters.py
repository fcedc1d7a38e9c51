"""Where a run's numbers go besides metrics.jsonl: TensorBoard, a Prometheus endpoint on loopback, Weights & Biases.

Each library is imported when a recipe asks for it. docs/monitoring.md says how to use them.
"""

from __future__ import annotations

import errno
import math
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from importlib.util import find_spec
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import Any, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from minite.config import RunConfig, config_to_dict, env
from minite.errors import UserError
from minite.ports import LOOPBACK  # what a run does is nobody's business on the network

MAX_VISITORS, PATIENCE = 16, 10.0  # at a time; for the next byte of a request [s]

# setting -> (package to import, extra of miniTE that installs it)
_NEEDED = {"driver.prometheus_port": ("prometheus_client", "prometheus"), "driver.wandb": ("wandb", "wandb")}


class Exporter(Protocol):
    """Takes the metrics of each step in turn. A value may be NaN or infinite."""

    def write(self, step: int, metrics: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


def check_exporters(config: RunConfig) -> None:
    """UserError where a recipe asks for an exporter whose package is not installed."""
    for setting, wanted in (
        ("driver.prometheus_port", config.driver.prometheus_port is not None),
        ("driver.wandb", config.driver.wandb),
    ):
        package, extra = _NEEDED[setting]
        if wanted and find_spec(package) is None:
            raise UserError(
                f"{config.where(setting)}: {setting} is set, but {package} is not installed: "
                f"pip install 'minite[{extra}]', or remove the setting"
            )


@contextmanager
def prometheus(config: RunConfig) -> Iterator[list[Exporter]]:
    """That of Prometheus, if the recipe asks for one, for the time of a ``with`` block. Raises UserError for a port in
    use. For a whole run, whatever is started again in it: else another program could take the port meanwhile.
    """
    if config.driver.prometheus_port is None:
        yield []
        return
    with closing(PrometheusEndpoint(config.driver.prometheus_port)) as opened:
        yield [opened]


@contextmanager
def records(config: RunConfig, run_dir: Path, after_step: int) -> Iterator[list[Exporter]]:
    """The others that the recipe asks for, open for the time of a ``with`` block.

    after_step: where the run goes on from a checkpoint its step, -1 for a new run; later steps will come again.
    """
    with ExitStack() as stack:
        opened: list[Exporter] = []

        def add(exporter: Exporter) -> None:
            stack.callback(exporter.close)
            opened.append(exporter)

        if config.driver.tensorboard:
            add(TensorBoard(run_dir / "tensorboard", after_step))
        if config.driver.wandb:
            add(WeightsAndBiases(config, run_dir, after_step))
        yield opened


class TensorBoard:
    """Event files in ``folder``. On a resumed run those of later steps are marked as void."""

    def __init__(self, folder: Path, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second of imports that a run without it does not pay

        self._writer = SummaryWriter(str(folder), purge_step=after_step + 1)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def close(self) -> None:
        self._writer.close()


class _Server(ThreadingMixIn, WSGIServer):
    """A thread for each visitor, but only for some at a time, and what goes wrong with one is nothing to the run."""

    daemon_threads = True

    def __init__(self, *args: Any) -> None:
        self._free = threading.BoundedSemaphore(MAX_VISITORS)
        super().__init__(*args)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._free.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Says nothing: the visitor left, or never came to the point."""


class _Handler(WSGIRequestHandler):
    timeout = PATIENCE

    def log_message(self, *_: Any) -> None:
        """Says nothing: the terminal is the run's."""


class PrometheusEndpoint:
    """http://127.0.0.1:PORT/metrics: the newest value of each metric as a gauge, `gap/p0.1` as `minite_gap_p0_1`."""

    def __init__(self, port: int) -> None:
        from prometheus_client import CollectorRegistry, make_wsgi_app

        self._registry = CollectorRegistry()  # not the library's global one: a process may hold several runs in turn
        try:
            self._server = make_server(LOOPBACK, port, make_wsgi_app(self._registry), _Server, _Handler)
        except OSError as error:
            if error.errno not in (errno.EADDRINUSE, errno.EACCES):
                raise
            raise UserError(
                f"driver.prometheus_port is {port}: {error.strerror.lower()} on {LOOPBACK}; another run may hold it: "
                "take another with -o driver.prometheus_port=N, or leave it out with null"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self._gauges: dict[str, Any] = {}

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        for key, value in {"step": float(step), **metrics}.items():
            self._gauge(key).set(value)

    def _gauge(self, key: str) -> Any:
        from prometheus_client import Gauge

        if key not in self._gauges:
            text = "number of the newest step" if key == "step" else f"{key} of docs/metrics.md"
            self._gauges[key] = Gauge(gauge_name(key), text, registry=self._registry)
        return self._gauges[key]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def gauge_name(key: str) -> str:
    """Prometheus' name of a metric."""
    return "minite_" + re.sub(r"[^a-zA-Z0-9_]", "_", key)


class WeightsAndBiases:
    """A run in the folder ``wandb`` of the run directory. Offline, unless wandb's own variables are set."""

    def __init__(self, config: RunConfig, run_dir: Path, after_step: int) -> None:
        import wandb

        self._run = wandb.init(
            project="minite",
            name=run_dir.name if after_step < 0 else f"{run_dir.name} from step {after_step}",
            group=run_dir.name,  # a resumed run is another run of wandb's beside the one it goes on from
            dir=str(run_dir),
            config=config_to_dict(config),
            mode=None if env.wandb_is_set_up() else "offline",
        )

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({key: value for key, value in metrics.items() if math.isfinite(value)}, step=step)

    def close(self) -> None:
        self._run.finish()
