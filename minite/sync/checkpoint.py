"""Directories of safetensors files: what they hold, read tensor by tensor; and written all or nothing.

A directory may come from anywhere, so nothing in it is believed: an index names plain files of the directory, which
hold what it says. Every fault is one UserError, before anything is written.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from minite.errors import UserError
from minite.sync.tensor_file import Slot, TensorFile, save_tensors
from minite.sync.verify import raw_bytes

INDEX = "model.safetensors.index.json"
FILE_BYTES = 2 << 30  # of one file, which is also what CheckpointWriter holds in memory
JSON_BYTES = 256 << 20  # no index is that large; reading one takes some ten times its size
SAMPLE = 4096  # bytes of every tensor that a fingerprint looks at


class Checkpoint:
    """The tensors of a directory, by name, whatever files they lie in.

    With an index, the files that it lists are read and others passed by, as serving engines do; without one, all
    are. UserError for a directory without any, and for everything that is damaged, contradicts itself or points
    out of the directory.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        listed = self._listed()
        names = sorted(set(listed.values())) or sorted(path.name for path in self.directory.glob("*.safetensors"))
        if not names:
            raise UserError(f"{self.directory} has no *.safetensors file; expected a Hugging Face checkpoint directory")
        self.files: dict[str, TensorFile] = {}
        self._home: dict[str, TensorFile] = {}
        for name in names:
            self.add_file(name)
        wrong = next((name for name, file in listed.items() if self._home.get(name) is not self.files[file]), None)
        if wrong:
            raise UserError(
                f"{self.directory}: {INDEX} says that {wrong} is in {listed[wrong]}, which has no such tensor"
            )

    @property
    def names(self) -> set[str]:
        return set(self._home)

    def add_file(self, name: str) -> None:
        """Also read a file that the index does not list. UserError for one that holds a tensor already held."""
        file = TensorFile(regular_file(self.directory, name))
        twice = next((tensor for tensor in file.slots if tensor in self._home), None)
        if twice:
            raise UserError(
                f"{self.directory}: {twice} is in both {self._home[twice].path.name} and {name}; remove the wrong file"
            )
        self.files[name] = file
        self._home |= dict.fromkeys(file.slots, file)

    def slot(self, name: str) -> Slot:
        """Dtype and shape of a tensor, without reading it. UserError when there is none of that name."""
        if name not in self._home:
            raise UserError(f"{self.directory}: has no tensor {name}; is it the model of the recipe?")
        return self._home[name].slots[name]

    def read(self, name: str, first: int = 0, count: int | None = None) -> Tensor:
        """One tensor, or ``count`` entries of its first axis from ``first`` on; on the CPU."""
        self.slot(name)
        return self._home[name].read(name, first, count)

    def fingerprint(self) -> str:
        """32 hexadecimal digits of what the directory holds: names, sizes, headers and the start of every tensor.

        The same for a copy. A change of the weights changes nearly every tensor, so their first 4 KiB tell it without
        reading everything; one that leaves all of those alone is not seen.
        """
        h = hashlib.blake2b(digest_size=16)
        for name, file in sorted(self.files.items()):
            h.update(f"{name}\0{len(file.header)}\0".encode())
            h.update(file.header)
            for slot in file.slots.values():
                h.update(raw_bytes(file.bytes_at(slot.offset, min(slot.nbytes, SAMPLE))).numpy().data)
        return h.hexdigest()

    def _listed(self) -> dict[str, str]:
        """Tensor -> file, as the index says; empty without one."""
        if not os.path.lexists(self.directory / INDEX):
            return {}
        path = self.directory / INDEX
        listed = read_json(path).get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(isinstance(file, str) for file in listed.values()):
            raise UserError(f"{path}: expected weight_map to be an object of tensor: file name; copy it again")
        for file in set(listed.values()):
            if Path(file).name != file or not file.isprintable() or not file.endswith(".safetensors"):
                raise UserError(f"{path}: lists {file!r}; expected the plain name of a .safetensors file beside it")
        return listed


def read_json(path: Path) -> dict[str, Any]:
    """A JSON file of the checkpoint that holds an object. UserError for anything else, also a huge or deep one."""
    try:
        if path.exists():
            regular_file(path.parent, path.name)
        if path.stat().st_size > JSON_BYTES:
            raise ValueError(f"{path.stat().st_size} bytes")
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: not readable as JSON ({error}); expected a file of the checkpoint") from None
    if not isinstance(data, dict):
        raise UserError(f"{path}: holds a {type(data).__name__}; expected a JSON object")
    return data


def regular_file(directory: Path, name: str) -> Path:
    """The file ``name`` of the directory. A link may lead elsewhere in the directory, or to the blobs of a Hugging
    Face cache, whose snapshots are links; one that leads out could feed any file of the machine to the converter.
    UserError for everything else."""
    path = directory / name
    try:
        inside = {directory.resolve(), directory.resolve().parent.parent / "blobs"}
        real = path.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a link to itself
        if not path.is_symlink() and not path.exists():
            raise UserError(f"{directory}: {name} is missing, but {INDEX} lists it; copy it again") from None
        raise UserError(f"{path}: cannot be read ({error})") from None
    if real.parent not in inside or not real.is_file():
        raise UserError(f"{path}: leads to {real}; expected a file in {directory} itself, copy it there")
    return path


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
        self.write_json(INDEX, index_json(self._index, self._total))
        self.partial.rename(self.directory)

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor; files are cut at ``file_bytes``."""
        nbytes = tensor.numel() * tensor.element_size()
        if self._held and self._size + nbytes > self.file_bytes:
            self._flush()
        self._held[name] = tensor.detach().cpu().contiguous()
        self._size += nbytes

    def write_json(self, name: str, data: Mapping[str, Any]) -> None:
        write_json(self.partial / name, data)

    def _flush(self) -> None:
        if not self._held:
            return
        self._files += 1
        name = f"model-{self._files:05d}.safetensors"
        save_tensors(self.partial / name, self._held)
        self._index |= dict.fromkeys(self._held, name)
        self._total += self._size
        self._held, self._size = {}, 0


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")


def index_json(files: Mapping[str, str], total_bytes: int) -> dict[str, Any]:
    """Content of INDEX: tensor -> file."""
    return {"metadata": {"total_size": total_bytes}, "weight_map": dict(files)}
