"""Directories of safetensors files: read tensor by tensor, written in bounded memory and all or nothing."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from minite.errors import UserError

INDEX = "model.safetensors.index.json"
FILE_BYTES = 2 << 30  # of one file, which is also what the writer holds in memory


class Checkpoint:
    """The tensors of a directory, by name, whatever files they lie in. UserError for a directory without any."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        files = sorted(self.directory.glob("*.safetensors"))
        if not files:
            raise UserError(f"{self.directory} has no *.safetensors file; expected a Hugging Face checkpoint directory")
        index = self.directory / INDEX
        if index.is_file():
            listed = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            absent = sorted(name for name in listed if not (self.directory / name).is_file())
            if absent:
                raise UserError(f"{self.directory}: {absent[0]} is missing, but {INDEX} lists it; copy it again")
        self._home: dict[str, Any] = {}
        for file in files:
            try:
                handle: Any = safe_open(str(file), framework="pt")
            except SafetensorError as error:
                raise UserError(f"{file}: damaged ({error}); copy it again") from None
            self._home |= dict.fromkeys(handle.keys(), handle)

    @property
    def names(self) -> set[str]:
        return set(self._home)

    def read(self, name: str) -> Tensor:
        """One tensor, on the CPU. UserError when there is none of that name."""
        if name not in self._home:
            raise UserError(f"{self.directory}: has no tensor {name}; is it the model of the recipe?")
        tensor: Tensor = self._home[name].get_tensor(name)
        return tensor


class CheckpointWriter:
    """Context manager that writes a new directory; it appears under its name only when the block ends well."""

    def __init__(self, directory: str | Path, file_bytes: int = FILE_BYTES) -> None:
        self.directory, self.file_bytes = Path(directory), file_bytes
        self.partial = self.directory.with_name(f".{self.directory.name}.partial-{os.getpid()}")
        self._index: dict[str, str] = {}
        self._held: dict[str, Tensor] = {}
        self._size = self._total = self._files = 0

    def __enter__(self) -> CheckpointWriter:
        if self.directory.exists():
            raise UserError(f"{self.directory}: exists already; name a new directory or remove this one")
        self.partial.mkdir(parents=True)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if kind is not None:
            shutil.rmtree(self.partial)
            return
        self._flush()
        index = {"metadata": {"total_size": self._total}, "weight_map": self._index}
        self.write_json(INDEX, index)
        self.partial.rename(self.directory)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; files are cut at ``file_bytes``."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._held and self._size + nbytes > self.file_bytes:
            self._flush()
        self._held[name] = tensor.detach().cpu().contiguous()
        self._size += nbytes

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        (self.partial / name).write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")

    def write_beside(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        """A safetensors file that the index does not list, so that other loaders pass it by."""
        save_file(dict(tensors), self.partial / name)

    def copy(self, file: Path) -> None:
        shutil.copyfile(file, self.partial / file.name)

    def _flush(self) -> None:
        if not self._held:
            return
        self._files += 1
        name = f"model-{self._files:05d}.safetensors"
        save_file(self._held, self.partial / name, metadata={"format": "pt"})
        self._index |= dict.fromkeys(self._held, name)
        self._total += self._size
        self._held, self._size = {}, 0
