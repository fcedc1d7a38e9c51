"""The directory of an unfinished conversion, DST.partial, and the journal that lets the same command go on with it.

The journal's first line says what is converted and how; then comes one line per finished file, written when the file
is on the disk. A file without a line is written again. A directory appears under its own name only when it is whole.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from minite.errors import UserError

JOURNAL = "minite_journal.jsonl"
_MEANING = {"source": "another source, or the source has changed", "plan": "another recipe", "to": "another --to"}


class Partial:
    """A new or a continued partial directory, locked against a second conversion.

    ``files``: names of all that will be written, in order. ``finished``: the journal's records of the first of them,
    each with "file" and "size".
    UserError when the target exists, or the directory holds a conversion of something else.
    """

    def __init__(self, target: Path, header: Mapping[str, Any], files: Sequence[str]) -> None:
        if target.exists() or target.is_symlink():
            raise UserError(f"{target}: exists already; name a new directory or remove this one")
        self.target, self.path = target, target.with_name(f"{target.name}.partial")
        self.path.mkdir(parents=True, exist_ok=True)
        self._file = open(self.path / JOURNAL, "a+b", buffering=0)  # noqa: SIM115 held as the lock
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"{self.path}: another process is converting into it; wait for it or name another"
            ) from None
        self.finished = self._continue(dict(header), files)

    def record(self, entry: Mapping[str, Any]) -> None:
        """A file is finished. Its bytes are on the disk already."""
        self._append(entry)
        self.finished.append(dict(entry))

    def publish(self) -> None:
        """Give the directory its own name. Should the process end before the last step, ``clean`` does it."""
        for file in self.path.iterdir():
            _flush(file)
        self.path.rename(self.target)
        _flush(self.target.parent)
        (self.target / JOURNAL).unlink()
        self._file.close()

    def close(self) -> None:
        """Leave the directory to a later run."""
        self._file.close()

    def discard(self) -> None:
        """Remove the directory: what is wrong would be wrong again."""
        shutil.rmtree(self.path)
        self._file.close()

    def _append(self, entry: Mapping[str, Any]) -> None:
        self._file.write(_line(entry) + b"\n")
        os.fsync(self._file.fileno())

    def _continue(self, header: dict[str, Any], files: Sequence[str]) -> list[dict[str, Any]]:
        others = [path for path in self.path.iterdir() if path.name != JOURNAL]
        self._file.seek(0)
        text = self._file.read()
        whole = text[: text.rfind(b"\n") + 1]  # a line without its end was being written when the process died
        try:
            lines = [json.loads(line) for line in whole.splitlines()]
            records = [{"file": str(line["file"]), "size": int(line["size"]), **line} for line in lines[1:]]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{self.path / JOURNAL}: damaged ({error}); start over with: rm -r {self.path}") from None
        if not lines:
            if others:
                raise UserError(f"{self.path}: is in the way and no conversion of minite's; remove it or name another")
            self._append(header)
            return []
        self._file.truncate(len(whole))
        for key, value in header.items():
            if not isinstance(lines[0], dict) or lines[0].get(key) != value:
                what = _MEANING.get(key, f"another {key}")
                raise UserError(f"{self.path}: begun with {what}; start over with: rm -r {self.path}")
        for record, name in zip_longest(records, files[: len(records)]):
            file = self.path / record["file"]
            if record["file"] != name or not file.is_file() or file.stat().st_size != record["size"]:
                raise UserError(f"{file}: not as it was finished; start over with: rm -r {self.path}")
        return records


def clean(target: Path, header: Mapping[str, Any]) -> bool:
    """Whether ``target`` is the finished conversion of which only the journal was not yet removed; it is now."""
    journal = target / JOURNAL
    if not journal.is_file() or journal.read_bytes().split(b"\n")[0] != _line(header):
        return False
    journal.unlink()
    return True


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps(entry, sort_keys=True).encode()


def _flush(path: Path) -> None:
    """The file, or the names in a directory, are on the disk: a rename that survives a power cut names whole files."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
