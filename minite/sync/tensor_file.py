"""One safetensors file: its header checked, its tensors read and written piece by piece.

The safetensors library checks a header (size, JSON, offsets against shapes, no gap, no overlap, nothing cut off); here
is added what it lets through. Tensors are read into fresh memory instead of being mapped, so that what a process holds
is what it works on; they are written at their offsets in any order, so that no file is ever held in memory.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from minite.errors import UserError
from minite.sync.stored import Stored
from minite.sync.verify import raw_bytes

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# The order in which safetensors lays tensors out: widest dtype first, which aligns them all.
_ORDER = (
    "I64", "F64", "F32", "I32", "BF16", "F16", "I16", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL",
)  # fmt: skip
PLAIN = ("BF16", "F16", "F32", "F64")  # of weights that are not quantized
MAX_AXES, MAX_SIZE = 8, 1 << 40  # of a shape: more is nonsense, and empty tensors of any shape pass the library

MAX_NAME = 512  # characters, of names that end up on terminals


@dataclass(frozen=True)
class Slot:
    """Where a tensor lies in its file."""

    dtype: str  # safetensors' name, perhaps one that torch has no type for
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    nbytes: int


class TensorFile:
    """A file to read. ``slots``: name -> Slot; ``header``: its bytes. UserError for a damaged or hostile file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with safe_open(str(path), framework="pt"):
                pass
            self._file = open(path, "rb", buffering=0)  # noqa: SIM115 open as long as this object lives
            size = int.from_bytes(self._file.read(8), "little")
            self.header = self.bytes_at(8, size).numpy().tobytes()
            entries = json.loads(self.header, object_pairs_hook=_no_duplicates)
        except (SafetensorError, OSError, ValueError, RecursionError) as error:
            raise UserError(f"{path}: damaged ({error}); copy or download it again") from None
        entries.pop("__metadata__", None)
        self.slots: dict[str, Slot] = {}
        for name, entry in entries.items():
            shape, (first, last) = tuple(entry["shape"]), entry["data_offsets"]
            if not name.isascii() or not name.isprintable() or len(name) > MAX_NAME:
                raise UserError(f"{path}: {name[:40]!r} is no name; expected up to {MAX_NAME} printable characters")
            if len(shape) > MAX_AXES or max(shape, default=0) > MAX_SIZE:
                got = f"{len(shape)} axes" if len(shape) > MAX_AXES else f"an axis of {max(shape)}"
                raise UserError(f"{path}: {name} has {got}; expected at most {MAX_AXES} axes of at most 2^40")
            self.slots[name] = Slot(entry["dtype"], shape, 8 + size + first, last - first)

    def read(self, name: str, first: int = 0, count: int | None = None) -> Tensor:
        """A tensor, or ``count`` entries of its first axis from ``first`` on; on the CPU."""
        slot = self.slots[name]
        if slot.dtype not in DTYPES:
            raise UserError(f"{self.path}: {name} has dtype {slot.dtype}; expected one of {', '.join(DTYPES)}")
        shape, offset, nbytes = slot.shape, slot.offset, slot.nbytes
        if count is not None:
            row = nbytes // shape[0]
            shape, offset, nbytes = (count, *shape[1:]), offset + first * row, count * row
        return self.bytes_at(offset, nbytes).view(DTYPES[slot.dtype]).reshape(shape)

    def bytes_at(self, offset: int, nbytes: int) -> Tensor:
        """Bytes of the file: uint8 [nbytes]."""
        data = torch.empty(nbytes, dtype=torch.uint8)
        view, done = data.numpy().data, 0
        while done < nbytes:
            got = os.preadv(self._file.fileno(), [view[done:]], offset + done)
            if not got:
                raise UserError(f"{self.path}: shorter than when it was opened; leave it alone and start again")
            done += got
        return data


class TensorFileWriter:
    """A file to write, of tensors known beforehand. The same bytes that ``safetensors.torch.save_file`` would write."""

    def __init__(self, path: Path, tensors: Mapping[str, Stored]) -> None:
        self.path, self._stored, self._missing = path, tensors, set(tensors)
        self._offsets: dict[str, int] = {}
        entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        place = 0
        for name in sorted(tensors, key=lambda name: (_ORDER.index(_NAMES[tensors[name].dtype]), name)):
            stored = tensors[name]
            nbytes = nbytes_of(stored)
            entries[name] = {
                "dtype": _NAMES[stored.dtype],
                "shape": list(stored.shape),
                "data_offsets": [place, place + nbytes],
            }
            self._offsets[name] = place
            place += nbytes
        header = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
        header += b" " * (-len(header) % 8)
        self.data_bytes = place
        self._start = 8 + len(header)
        self.size = self._start + place
        self._file = open(path, "wb", buffering=0)  # noqa: SIM115 closed by close()
        self._file.write(len(header).to_bytes(8, "little") + header)
        self._file.truncate(self.size)

    def write(self, name: str, tensor: Tensor) -> None:
        """Write one tensor to its place."""
        stored = self._stored[name]
        assert (tuple(tensor.shape), tensor.dtype) == (stored.shape, stored.dtype), f"{name}: {stored}"
        view, offset = raw_bytes(tensor).numpy().data, self._start + self._offsets[name]
        done = 0
        while done < len(view):
            done += os.pwrite(self._file.fileno(), view[done:], offset + done)
        self._missing.remove(name)

    def close(self) -> None:
        """All tensors are written and on the disk."""
        assert not self._missing, f"{self.path}: {sorted(self._missing)[0]} was never written"
        os.fsync(self._file.fileno())
        self._file.close()

    def abandon(self) -> None:
        """Leave the file as it is, unfinished."""
        self._file.close()


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a whole file. Unlike the library's function it leaves its mode to the umask and raises OSError."""
    writer = TensorFileWriter(path, {name: Stored(tuple(t.shape), t.dtype) for name, t in tensors.items()})
    for name, tensor in tensors.items():
        writer.write(name, tensor)
    writer.close()


def nbytes_of(stored: Stored) -> int:
    """Bytes of a tensor of this shape and dtype."""
    return math.prod(stored.shape) * stored.dtype.itemsize


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json: a key twice is an error; of two tensors of one name, which one is read would be chance."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"key {key!r} stands there twice")
        found[key] = value
    return found
