"""A converted checkpoint as a weight update: what a learner would send, read from the files of `minite convert`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import Tensor

from minite.sync.digests import every_tensor, told_by
from minite.sync.targets import to_sent
from minite.types import WeightVersion


def announced(directory: str | Path, step: int = 0) -> WeightVersion:
    """The version that the files hold, by their digest file; nothing else is read. UserError where there is none."""
    told = told_by(directory)
    return WeightVersion(step, told["plan_digest"], told["digest"])


def manifest(directory: str | Path) -> dict[str, str]:
    """Digest of every tensor that would be sent, by name."""
    return dict(told_by(directory)["tensors"])


def sent_tensors(directory: str | Path) -> Iterator[tuple[str, Tensor]]:
    """The tensors that a sampler would be sent, one by one. UserError for a damaged directory."""
    to = told_by(directory)["to"]
    reader = every_tensor(directory)
    for name in sorted(reader.names):
        as_sent = to_sent(to, name, reader.read(name))
        if as_sent is not None:
            yield as_sent
