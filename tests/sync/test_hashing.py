"""sync.hashing: the same digest by every route, another one after every change. BITWISE."""

from __future__ import annotations

import hashlib
import struct

import pytest
import torch

from minite.sync import hashing
from minite.sync.hashing import CHUNK, tensor_digests

DTYPES = (torch.bfloat16, torch.uint8, torch.float8_e4m3fn, torch.int32, torch.float32, torch.float64, torch.bool)
SIZES = (0, 1, 3, 4, 5, 7, 16, 1001, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 6)


def raw(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def digest(tensor: torch.Tensor) -> str:
    return tensor_digests({"w": tensor})["w"]


def by_definition(name: str, tensor: torch.Tensor) -> str:
    """The text at the head of hashing.py, in Python's integers."""
    data = bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())
    noise = hashlib.shake_128(b"minite weights").digest(2 * 16_384 * 8)
    keys = [key | 1 for key in struct.unpack(f"<{2 * 16_384}Q", noise)]
    h = hashlib.blake2b(digest_size=16)
    h.update(f"{name}\0{str(tensor.dtype).removeprefix('torch.')}\0{tuple(tensor.shape)}\0".encode())
    for start in range(0, len(data), CHUNK):
        chunk = data[start : start + CHUNK]
        chunk += bytes(-len(chunk) % 4)
        words = struct.unpack(f"<{len(chunk) // 4}i", chunk)
        for lane in (keys[:16_384], keys[16_384:]):
            h.update(struct.pack("<Q", sum(w * k for w, k in zip(words, lane, strict=False)) % 2**64))
    return h.hexdigest()


@pytest.mark.parametrize("size", SIZES)
def test_it_is_what_it_says_it_is(size):
    assert digest(raw(size)) == by_definition("w", raw(size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_counts_by_its_bytes(dtype):
    tensor = raw(24 * 40).bool() if dtype is torch.bool else raw(24 * 40).view(dtype)
    assert digest(tensor.view(3, -1)) == by_definition("w", tensor.view(3, -1))
    assert digest(tensor) != digest(tensor.view(torch.int8))


def test_side_by_side_in_slices_or_alone(monkeypatch):
    """Many tensors at once give each the digest that it has alone, whatever the size of a piece."""
    tensors = {f"t{i}": raw(size, i) for i, size in enumerate(SIZES * 3)} | {
        f"amax{i}": torch.rand(()) for i in range(99)
    }
    alone = {name: tensor_digests({name: tensor})[name] for name, tensor in tensors.items()}
    assert tensor_digests(tensors) == alone
    assert tensor_digests(dict(reversed(tensors.items()))) == alone
    for chunks in (1, 3, 256):
        monkeypatch.setitem(hashing._PIECE, "cpu", chunks * CHUNK)
        assert tensor_digests(tensors) == alone


def test_strides_and_offsets_do_not_matter():
    tensor = raw(60 * 70).view(60, 70)
    assert digest(tensor.t()) == digest(tensor.t().contiguous()) != digest(tensor)
    assert digest(tensor[:, ::3]) == digest(tensor[:, ::3].contiguous())
    flat = raw(3 * CHUNK)
    for offset in (1, 2, 3, 4, 7):
        assert digest(flat[offset : offset + CHUNK]) == digest(flat[offset : offset + CHUNK].clone())
    assert digest(torch.nn.Parameter(torch.ones(3))) == digest(torch.ones(3))


@pytest.mark.parametrize("size", [5, 1001, CHUNK, CHUNK + 9, 3 * CHUNK])
def test_a_flipped_bit_is_seen(size):
    whole, tensor = digest(raw(size)), raw(size)
    generator = torch.Generator().manual_seed(size)
    places = [0, size - 1, *torch.randint(0, size, (30,), generator=generator).tolist()]
    for place in places:
        for bit in range(8):
            tensor[place] ^= 1 << bit
            assert digest(tensor) != whole, (place, bit)
            tensor[place] ^= 1 << bit
    assert digest(tensor) == whole


def test_the_same_bit_flipped_in_two_places_is_seen():
    """Where a sum of words without keys, or of 64-bit words with odd keys, sees nothing: both signs turned."""
    tensor = raw(CHUNK).view(torch.int32)
    whole, seen = digest(tensor), set()
    for i in range(200):
        changed = tensor.clone()
        changed[[i, 16_000 - i]] ^= -(2**31)
        seen.add(digest(changed))
    assert len(seen) == 200 and whole not in seen


def test_each_lane_alone_sees_that_order_matters():
    """A lane that saw nothing would halve the bits, and the digest would not tell."""
    words = raw(CHUNK).view(torch.int32).long()
    for key in hashing._keys(torch.device("cpu")):
        sums = {int((words.roll(by) * key).sum()) for by in range(100)}
        assert len(sums) == 100 and bool((key & 1).all())


@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.flip(0),
        lambda t: t[torch.tensor([1, 0, *range(2, len(t))])],  # two rows swapped
        lambda t: t.roll(1),
        lambda t: t.roll(CHUNK, 0),  # whole chunks moved
        lambda t: t.reshape(-1, 2 * t.shape[1]),
        lambda t: t.reshape(-1),
        lambda t: t[None],
        lambda t: t.view(torch.int8),
        lambda t: t[:-1],
        lambda t: torch.cat([t, t.new_zeros(1, t.shape[1])]),  # zeros at the end count
    ],
)
def test_rows_shapes_and_dtypes_matter(change):
    tensor = raw(6 * CHUNK).view(-1, 64)
    assert digest(change(tensor)) != digest(tensor)


def test_names_matter_and_so_swapped_tensors_do():
    a, b = raw(100, 1), raw(100, 2)
    straight, swapped = tensor_digests({"a": a, "b": b}), tensor_digests({"a": b, "b": a})
    assert len({*straight.values(), *swapped.values()}) == 4


def test_zeros_of_every_length_differ():
    lengths = [*range(20), CHUNK, CHUNK + 1, 2 * CHUNK]
    assert len({digest(torch.zeros(n, dtype=torch.uint8)) for n in lengths}) == len(lengths)


def test_no_piece_is_large(monkeypatch):
    """What is computed beside a tensor has the size of a piece, not of the tensor."""
    sizes, inner = [], hashing._Piece.sum
    monkeypatch.setattr(hashing._Piece, "sum", lambda piece: (sizes.append(piece.size), inner(piece)))
    tensor_digests({"large": torch.zeros(16 << 20, dtype=torch.uint8)} | {f"s{i}": raw(1000) for i in range(999)})
    assert sum(sizes) == (16 << 20) + 999_000
    assert max(sizes) < hashing._PIECE["cpu"] + 1000


@pytest.mark.parametrize("words", [1, 7, 1000, 16_384])
def test_a_gpus_way_to_sum_is_a_cpus(words):
    words_CW = raw(40 * words * 4).view(torch.int32).view(40, -1)
    keys_LW = hashing._keys(torch.device("cpu"))[:, :words]
    assert torch.equal(hashing._lanes_by_torch(words_CW, keys_LW), hashing._lanes(words_CW, keys_LW))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gpu_finds_the_same(dtype):
    sizes = (*SIZES, 300 * CHUNK + 12)  # more than one piece of a GPU
    tensors = {f"t{i}": raw(size - size % dtype.itemsize, i) for i, size in enumerate(sizes)}
    tensors = {name: t.bool() if dtype is torch.bool else t.view(dtype) for name, t in tensors.items()}
    assert tensor_digests({name: t.cuda() for name, t in tensors.items()}) == tensor_digests(tensors)
