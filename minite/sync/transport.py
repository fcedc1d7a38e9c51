"""Moving weights between processes: buckets of bounded size, ending with a manifest of digests.

On the wire every tensor is a plain CPU tensor. FP8 tensors, which many serializers do not know, go as uint8 and
carry their dtype in the key: ``NAME|float8_e4m3fn``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from minite.sync.errors import SyncError
from minite.sync.flat import text, to_host
from minite.sync.hashing import dtype_name
from minite.sync.verify import Digest, combine
from minite.types import WeightVersion

MANIFEST = "#manifest"  # key of the last bucket's only tensor: JSON {name: digest}
UNQUANTIZED = "#unquantized"  # key in a bucket whose tensors come in the model's dtype, to be quantized on arrival
BUCKET_BYTES = 256 << 20  # large enough to amortise a message, small against a host's memory
_TAGGED = {dtype_name(d): d for d in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)}

Bucket = dict[str, Tensor]
Groups = Iterable[tuple[str, Mapping[str, Tensor]]]


def to_wire(tensors: Mapping[str, Tensor]) -> Bucket:
    """Plain CPU tensors, FP8 as tagged uint8."""
    wire = {}
    for name, tensor in to_host(tensors).items():
        tag = dtype_name(tensor.dtype)
        if tag in _TAGGED:
            wire[f"{name}|{tag}"] = tensor.view(torch.uint8)
        else:
            wire[name] = tensor
    return wire


def from_wire(bucket: Mapping[str, Tensor]) -> Bucket:
    """Inverse of ``to_wire``; names without a tag pass unchanged. An unknown tag is a SyncError."""
    tensors = {}
    for key, tensor in bucket.items():
        name, _, tag = key.partition("|")
        if tag and tag not in _TAGGED:
            raise SyncError(f"{name}: unknown dtype tag {tag!r} on the wire; known: {', '.join(_TAGGED)}")
        tensors[name] = tensor.view(_TAGGED[tag]) if tag else tensor
    return tensors


def buckets(groups: Groups, max_bytes: int = BUCKET_BYTES, quantized: Digest | None = None) -> Iterator[Bucket]:
    """Wire buckets of at most ``max_bytes`` (or of one tensor that is larger), then one with the manifest alone.

    Args:
        groups: (module group, named tensors), as ``sync.export.pack`` yields them; a group may be split.
        quantized: for groups of ``sync.export.unquantized``, the digest that comes with them.
    """
    digest, size = Digest() if quantized is None else quantized, 0
    held: dict[str, Tensor] = {}

    def leave() -> Bucket:
        """Hashed where the tensors lie; then one copy to the host for all of a bucket."""
        if quantized is not None:
            return to_wire(held) | {UNQUANTIZED: text("")}
        digest.update_many(held)
        return to_wire(held)

    for _, tensors in groups:
        for name, tensor in tensors.items():
            nbytes = tensor.numel() * tensor.element_size()
            if held and size + nbytes > max_bytes:
                yield leave()
                held, size = {}, 0
            if name in held:
                raise SyncError(f"{name}: arrived twice in one set of weights; each tensor must be sent once")
            held[name] = tensor
            size += nbytes
    if held:
        yield leave()
    yield {MANIFEST: text(json.dumps(digest.parts, sort_keys=True))}


def read_manifest(tensor: Tensor) -> dict[str, str]:
    """``Digest.parts`` of the sender, from the manifest tensor."""
    try:
        return dict(json.loads(bytes(tensor.cpu().numpy())))
    except ValueError as error:
        raise SyncError(f"the manifest of the weights is damaged ({error}); send the weights again") from None


def package(
    groups: Groups,
    step: int,
    plan_digest: str,
    max_bytes: int = BUCKET_BYTES,
    quantized: Digest | None = None,
) -> tuple[list[Bucket], WeightVersion]:
    """All buckets of one weight version, and the version: what a learner hands to its samplers."""
    sent = list(buckets(groups, max_bytes, quantized))
    parts = read_manifest(sent[-1][MANIFEST])
    return sent, WeightVersion(step, plan_digest, combine(parts))
