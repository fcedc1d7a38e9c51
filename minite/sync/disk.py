"""A converted checkpoint as a weight update: what a learner would send, read from the files of `minite convert`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from minite.errors import UserError
from minite.sync.checkpoint import Checkpoint
from minite.sync.digests import DIGEST_FILE, read_digests
from minite.sync.source import AMAX_FILE
from minite.sync.targets import to_sent
from minite.types import WeightVersion


def announced(directory: str | Path, step: int = 0) -> WeightVersion:
    """The version that the files hold, by their digest file; nothing else is read. UserError where there is none."""
    told = _told(directory)
    return WeightVersion(step, told["plan_digest"], told["digest"])


def manifest(directory: str | Path) -> dict[str, str]:
    """Digest of every tensor that would be sent, by name."""
    return dict(_told(directory)["tensors"])


def sent_tensors(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a sampler would be sent, one by one. UserError for a damaged directory."""
    to = _told(directory)["to"]
    reader = Checkpoint(directory)
    if (Path(directory) / AMAX_FILE).exists():
        reader.add_file(AMAX_FILE)
    for name in sorted(reader.names):
        as_sent = to_sent(to, name, reader.read(name))
        if as_sent is not None:
            yield as_sent


def _told(directory: str | Path) -> dict[str, Any]:
    path = Path(directory) / DIGEST_FILE
    if not path.is_file():
        raise UserError(
            f"{directory}: has no {DIGEST_FILE}, by which the weights are verified; expected a directory that "
            "minite convert wrote"
        )
    told = read_digests(path)
    if {"to", "digest", "plan_digest", "tensors"} - told.keys() or not isinstance(told["tensors"], dict):
        raise UserError(f"{path}: not what minite convert writes; copy it again")
    return told
