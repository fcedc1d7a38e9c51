"""The digest of a tensor, computed where the tensor lies: 16 bytes for every 64 KiB come to the host, not the tensor.

    word    4 bytes as a signed integer; the end of a tensor is filled up with zeros
    chunk   16,384 words; the last one of a tensor may be short
    lane    sum over a chunk's words of word * key mod 2^64, with an odd 64-bit key for every place; two lanes
    digest  blake2b-128 over name, dtype, shape and the lanes of all chunks in order

Integers only, and a sum mod 2^64 is the same in any order: a CPU and a GPU find the same bits, however they split it.

What it sees. One word that differs, as one flipped bit makes, is always seen: 0 < |difference| < 2^32 times an odd key
is no multiple of 2^64. Whatever else differs within a chunk (elements or rows swapped, shifted, lost) leaves a lane as
it was with a chance of 2^-32 at most, and both with 2^-64, since their keys have nothing to do with each other; chunks,
shapes and dtypes are told apart by blake2b. The keys are no secret: this finds accidents, it does not stop a forger.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor

WORD, LANES = 4, 2
CHUNK = 16_384 * WORD  # bytes
_MOST_THREADS = 8  # on a CPU: by then the memory is what takes the time
_PIECE = {"cpu": 16 * CHUNK, "cuda": 256 * CHUNK}  # bytes at a time: a CPU's cache; enough to fill a GPU


@dataclass
class _Piece:
    """Chunks of one length, to be summed at once."""

    parts: list[Tensor]  # each uint8 [chunks, bytes], of one device
    places: list[Tensor]  # where their lanes go: each int64 [chunks, LANES], on the host
    size: int = 0  # bytes

    def add(self, part: Tensor, place: Tensor) -> None:
        self.parts.append(part)
        self.places.append(place)
        self.size += part.nbytes

    def sum(self) -> None:
        """Fill the places. On a GPU this takes six times the memory of the parts, on a CPU none or as much."""
        words_CW = _words(self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts))
        lanes_CL = _lanes(words_CW, _keys(words_CW.device)[:, : words_CW.shape[1]])
        for place, lanes in zip(self.places, torch.split(lanes_CL, [len(part) for part in self.parts]), strict=True):
            place.copy_(lanes)


def tensor_digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """32 hexadecimal digits for each tensor, of any dtype and device.

    Beside copies of tensors that are not contiguous, memory is taken for a few pieces: at most 1 MiB for each
    processor, or 100 MiB on a GPU.
    """
    lanes = {
        name: torch.empty(-(-tensor.nbytes // CHUNK), LANES, dtype=torch.int64) for name, tensor in tensors.items()
    }
    pieces = _pieces(tensors, lanes)
    if all(tensor.is_cpu for tensor in tensors.values()):
        with ThreadPoolExecutor(min(_MOST_THREADS, len(os.sched_getaffinity(0)))) as pool:
            list(pool.map(_Piece.sum, pieces))
    else:
        for piece in pieces:
            piece.sum()
    return {name: _digest(name, tensor, lanes[name]) for name, tensor in tensors.items()}


def dtype_name(dtype: torch.dtype) -> str:
    """``float8_e4m3fn`` for ``torch.float8_e4m3fn``."""
    return str(dtype).removeprefix("torch.")


def _pieces(tensors: Mapping[str, Tensor], lanes: Mapping[str, Tensor]) -> Iterator[_Piece]:
    """Large tensors in slices, small ones side by side."""
    waiting: dict[tuple[torch.device, int], _Piece] = {}
    for name, tensor in tensors.items():
        raw, limit = tensor.detach().contiguous().reshape(-1).view(torch.uint8), _PIECE[tensor.device.type]
        whole = raw.numel() // CHUNK
        slices = [(first, min(first + limit // CHUNK, whole)) for first in range(0, whole, limit // CHUNK)]
        parts = [(raw[a * CHUNK : b * CHUNK].view(-1, CHUNK), lanes[name][a:b]) for a, b in slices]
        if raw.numel() % CHUNK:
            parts.append((raw[whole * CHUNK :][None], lanes[name][whole:]))
        for part, place in parts:
            kind = (part.device, part.shape[1])
            piece = waiting.setdefault(kind, _Piece([], []))
            piece.add(part, place)
            if piece.size >= limit:
                yield waiting.pop(kind)
    yield from waiting.values()


def _words(bytes_CB: Tensor) -> Tensor:
    """uint8 [chunks, bytes] -> int32 [chunks, words]."""
    if missing := -bytes_CB.shape[1] % WORD:
        bytes_CB = torch.cat([bytes_CB, bytes_CB.new_zeros(len(bytes_CB), missing)], 1)
    elif bytes_CB.storage_offset() % WORD:
        bytes_CB = bytes_CB.clone()
    return bytes_CB.view(torch.int32)


def _lanes(words_CW: Tensor, keys_LW: Tensor) -> Tensor:
    """int64 [chunks, LANES] on the CPU. There NumPy takes a third of torch's time: it stores no products."""
    if words_CW.is_cpu:
        return torch.from_numpy(np.einsum("cw,lw->cl", words_CW.numpy(), keys_LW.numpy()))
    return _lanes_by_torch(words_CW, keys_LW).cpu()


def _lanes_by_torch(words_CW: Tensor, keys_LW: Tensor) -> Tensor:
    wide_CW = words_CW.long()
    return torch.stack([(wide_CW * key_W).sum(-1) for key_W in keys_LW], -1)


@cache
def _keys(device: torch.device) -> Tensor:
    """int64 [LANES, words of a chunk], odd."""
    size = LANES * CHUNK // WORD
    noise = bytearray(hashlib.shake_128(b"minite weights").digest(8 * size))
    return (torch.frombuffer(noise, dtype=torch.int64) | 1).view(LANES, -1).to(device)


def _digest(name: str, tensor: Tensor, lanes: Tensor) -> str:
    h = hashlib.blake2b(f"{name}\0{dtype_name(tensor.dtype)}\0{tuple(tensor.shape)}\0".encode(), digest_size=16)
    h.update(lanes.numpy().data)
    return h.hexdigest()
