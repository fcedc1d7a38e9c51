"""Do learner and sampler hold the same bytes? Digests to compare across processes, and a plain comparison."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor

from minite.sync.errors import SyncError
from minite.sync.hashing import dtype_name, tensor_digests


def raw_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor in row-major order: uint8 [numel * itemsize] on the CPU."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


class Digest:
    """Digest over (name, dtype, shape, bytes) of a set of named tensors, independent of the order of arrival.

    Each tensor has its own digest, made where it lies (hashing.py); the whole is blake2b-128 over "name digest" lines
    sorted by name. Keeping the parts lets a mismatch be blamed on a tensor.
    """

    def __init__(self) -> None:
        self.parts: dict[str, str] = {}  # name -> hex digest of that tensor

    def update(self, name: str, tensor: Tensor) -> None:
        """Add one tensor of any dtype and device. A name that was added before is a SyncError."""
        self.update_many({name: tensor})

    def update_many(self, tensors: Mapping[str, Tensor]) -> None:
        """Add all of them, which is faster than one by one."""
        for name, digest in tensor_digests(tensors).items():
            if name in self.parts:
                raise SyncError(f"{name}: arrived twice in one set of weights; each tensor must be sent once")
            self.parts[name] = digest

    def hexdigest(self) -> str:
        """32 hexadecimal digits."""
        return combine(self.parts)


def combine(parts: Mapping[str, str]) -> str:
    """Digest of the whole from the digests of its tensors (``Digest.parts``)."""
    h = hashlib.blake2b(digest_size=16)
    for name in sorted(parts):
        h.update(f"{name} {parts[name]}\n".encode())
    return h.hexdigest()


def first_difference(expected: Mapping[str, str], held: Mapping[str, str]) -> str | None:
    """Blame a mismatch of two ``Digest.parts`` on the first tensor, by name order. None when they agree."""
    for name in sorted(expected.keys() | held.keys()):
        if name not in held:
            return f"{name}: sent but not held"
        if name not in expected:
            return f"{name}: held but never sent"
        if expected[name] != held[name]:
            return f"{name}: held bytes differ from those sent (digest {held[name]}, sent {expected[name]})"
    return None


def compare(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> str | None:
    """First difference of two sets of named tensors, by name order: None, or one line with name and coordinate.

    Bytes are compared, so two NaN with equal bits agree and 0.0 differs from -0.0.
    """
    for name in sorted(a.keys() | b.keys()):
        if name not in a or name not in b:
            return f"{name}: only in the {'first' if name in a else 'second'} set"
        x, y = a[name], b[name]
        if (x.dtype, x.shape) != (y.dtype, y.shape):
            return f"{name}: {dtype_name(x.dtype)} {tuple(x.shape)} against {dtype_name(y.dtype)} {tuple(y.shape)}"
        x_bytes, y_bytes = raw_bytes(x), raw_bytes(y)
        if not torch.equal(x_bytes, y_bytes):
            at = int((x_bytes != y_bytes).nonzero()[0]) // x.element_size()
            coordinate = tuple(int(i) for i in torch.unravel_index(torch.tensor(at), x.shape))
            first, second = x.reshape(-1)[at].item(), y.reshape(-1)[at].item()
            return f"{name}: first differs at {list(coordinate)}: {first!r} against {second!r}"
    return None
