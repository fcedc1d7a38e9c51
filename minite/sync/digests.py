"""minite_digest.json: what a converted checkpoint holds, in the terms in which a weight sync is verified.

tensors   digest of every tensor that a sampler would be sent, by its name there (``verify.Digest.parts``)
digest    of all of them: equal to ``WeightVersion.weight_digest`` when a learner with the same weights and plan
          sends them
disk_only digest of what only the files have: outer and input scales, KV scales
hash      how tensors are hashed: HASH
plan_digest, to, source, minite
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from minite import __version__
from minite.errors import UserError
from minite.sync.checkpoint import Checkpoint, read_json
from minite.sync.source import AMAX_FILE
from minite.sync.targets import TARGETS, to_sent
from minite.sync.verify import Digest, combine, first_difference

DIGEST_FILE = "minite_digest.json"
HASH = "lanes64"  # sync/hashing.py; files without it hold hashes of another kind
Progress = Callable[[int, int], None]  # (bytes done, bytes in all)


def digest_json(
    sent: Mapping[str, str], disk_only: Mapping[str, str], *, plan_digest: str, to: str, source: str
) -> dict[str, Any]:
    """Content of the file."""
    return {
        "digest": combine(sent),
        "hash": HASH,
        "plan_digest": plan_digest,
        "to": to,
        "source": source,
        "minite": __version__,
        "tensors": dict(sorted(sent.items())),
        "disk_only": dict(sorted(disk_only.items())),
    }


def read_digests(path: Path) -> dict[str, Any]:
    """Content of a digest file. UserError for one whose hashes this miniTE does not compute."""
    told = read_json(path)
    if told.get("hash") != HASH:
        raise UserError(
            f"{path}: its digests are of kind {told.get('hash')!r}, expected {HASH!r}: another version of miniTE wrote "
            "them; convert the checkpoint again"
        )
    return told


def told_by(directory: str | Path) -> dict[str, Any]:
    """Content of the digest file that minite convert wrote there. UserError for none, or one that is damaged."""
    path = Path(directory) / DIGEST_FILE
    if not path.is_file():
        raise UserError(
            f"{directory}: has no {DIGEST_FILE}, by which its weights are verified; expected a directory that "
            "minite convert wrote"
        )
    told = read_digests(path)
    dicts = all(isinstance(told.get(key), dict) for key in ("tensors", "disk_only"))
    if {"digest", "plan_digest"} - told.keys() or not dicts or told.get("to") not in TARGETS:
        raise UserError(f"{path}: not what minite convert writes; copy it again")
    return told


def every_tensor(directory: str | Path) -> Checkpoint:
    """A reader of all tensors in a converted checkpoint, those for miniTE alone too. UserError for a damaged one."""
    reader = Checkpoint(directory)
    if (Path(directory) / AMAX_FILE).exists():
        reader.add_file(AMAX_FILE)
    return reader


def verify_directory(directory: str | Path, progress: Progress | None = None) -> str | None:
    """Read every tensor of a converted checkpoint and compare with its digest file.

    Returns None when all are as they were written, else one line that names the first tensor that is not.
    Raises UserError without a digest file, or for one that is damaged.
    """
    told, reader = told_by(directory), every_tensor(directory)
    sent, disk_only = Digest(), Digest()
    total, done = sum(reader.slot(name).nbytes for name in reader.names), 0
    for name in sorted(reader.names):
        tensor = reader.read(name)
        as_sent = to_sent(told["to"], name, tensor)
        if as_sent is None:
            disk_only.update(name, tensor)
        else:
            sent.update(*as_sent)
        done += reader.slot(name).nbytes
        if progress is not None:
            progress(done, total)
    differs = first_difference(told["tensors"], sent.parts) or first_difference(told["disk_only"], disk_only.parts)
    if differs is None and combine(sent.parts) != told.get("digest"):
        return f"{Path(directory) / DIGEST_FILE}: its digest is not that of its tensors"
    return differs and f"{directory}: {differs}".replace("sent", "written")
