"""One output file in the making: written and digested beside the quantizing of the next unit."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from minite.config import PrecisionPlan
from minite.sync.names import AMAX
from minite.sync.stored import Stored
from minite.sync.targets import to_disk, to_sent
from minite.sync.tensor_file import TensorFileWriter
from minite.sync.verify import Digest


class OutputFile:
    """Context manager. Hashing and writing take half of a conversion's time and no interpreter, so a thread does them.

    At most one unit waits for it: memory stays that of two. What goes wrong in it is raised by the next call.
    """

    def __init__(
        self, path: Path, stored: Mapping[str, Stored], to: str, plan: PrecisionPlan, inputs: Mapping[str, float]
    ) -> None:
        self._writer, self._to, self._plan, self._inputs = TensorFileWriter(path, stored), to, plan, inputs
        self._sent, self._disk_only = Digest(), Digest()
        self._amax: dict[str, float] = {}
        self._pool = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._pool.shutdown()
        if kind is not None:
            self._writer.abandon()

    def add(self, sent: Mapping[str, Tensor]) -> None:
        """Write what a sampler would be sent for one unit."""
        self._wait()
        self._pending = self._pool.submit(self._emit, sent)

    def finish(self) -> dict[str, Any]:
        """The file is complete and on the disk; its record for the journal."""
        self._wait()
        self._writer.close()
        return {
            "file": self._writer.path.name,
            "size": self._writer.size,
            "sent": self._sent.parts,
            "disk_only": self._disk_only.parts,
            "amax": self._amax,
        }

    def _wait(self) -> None:
        if self._pending is not None:
            self._pending.result()

    def _emit(self, sent: Mapping[str, Tensor]) -> None:
        on_disk = to_disk(self._to, self._plan, sent, self._inputs)
        for name, tensor in on_disk.items():
            self._writer.write(name, tensor)
        self._disk_only.update_many({name: t for name, t in on_disk.items() if to_sent(self._to, name, t) is None})
        self._sent.update_many(sent)
        for name, tensor in sent.items():
            if name.endswith(f".{AMAX}"):
                self._amax[name] = float(tensor)
