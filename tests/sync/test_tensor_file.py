"""sync.tensor_file: the bytes that the safetensors library writes, and what it lets through refused."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from minite.errors import UserError
from minite.sync.stored import Stored
from minite.sync.tensor_file import DTYPES, TensorFile, TensorFileWriter
from minite.sync.verify import compare


def tensors() -> dict[str, torch.Tensor]:
    """Every dtype, odd sizes, names that JSON must escape, a number and an empty tensor."""
    g = torch.Generator().manual_seed(0)
    named = {
        f"{dtype}.{i}": (torch.rand(3, 2 * i + 1, generator=g) * 9).to(dtype)
        for dtype in DTYPES.values()
        for i in (0, 1)
    }
    return named | {"number": torch.tensor(1.5), 'e"\\': torch.ones(0, 3), "Z": torch.ones(1), "a": torch.ones(1)}


def write(path, named, order=None) -> None:
    writer = TensorFileWriter(path, {name: Stored(tuple(t.shape), t.dtype) for name, t in named.items()})
    for name in order or named:
        writer.write(name, named[name])
    writer.close()


def test_same_bytes_as_the_library_in_any_order_of_writing(tmp_path):
    named = tensors()
    save_file(named, tmp_path / "theirs", metadata={"format": "pt"})
    write(tmp_path / "ours", named, list(named)[::-1])
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_reads_what_the_library_reads(tmp_path):
    write(tmp_path / "f", tensors())
    file = TensorFile(tmp_path / "f")
    with safe_open(tmp_path / "f", "pt") as theirs:
        assert file.slots.keys() == set(theirs.keys())
        assert compare({n: file.read(n) for n in file.slots}, {n: theirs.get_tensor(n) for n in file.slots}) is None


def test_a_tensor_left_out_is_a_defect_and_not_a_file(tmp_path):
    writer = TensorFileWriter(tmp_path / "f", {"a": Stored((1,), torch.uint8)})
    with pytest.raises(AssertionError, match="a was never written"):
        writer.close()


TWICE = b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"I8","shape":[1],"data_offsets":[0,1]}}'


def raw(path, header, body=b"") -> TensorFile:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + body)
    return TensorFile(path)


def entry(dtype="F32", shape=(1,), offsets=(0, 4)) -> dict[str, object]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("header", "body", "text"),
    [
        (b"", b"", "damaged"),
        (b"{", b"", "damaged"),
        (b"[" * 5000, b"", "damaged"),
        (b"\xff\xfe", b"", "damaged"),
        ({"a": entry()}, b"123", "damaged"),
        ({"a": entry()}, b"12345", "damaged"),
        ({"a": entry(), "b": entry()}, b"1234", "damaged"),
        ({"a": entry(offsets=(4, 8))}, b"12345678", "damaged"),
        ({"a": entry(shape=(1 << 62, 4))}, b"1234", "damaged"),
        ({"a": entry(shape=(-1,))}, b"1234", "damaged"),
        ({"a": entry(dtype="F99")}, b"1234", "damaged"),
        ({"a": {"dtype": "F32"}}, b"1234", "damaged"),
        ({"__metadata__": {"x": 1}}, b"", "damaged"),
        ({"a": entry("U8", (0, 1 << 62), (0, 0))}, b"", "a has an axis of 4611686018427387904"),
        ({"a": entry("U8", [1] * 9, (0, 1))}, b"1", "a has 9 axes"),
        ({"a\x1b[2J": entry()}, b"1234", "is no name; expected up to 512 printable"),
        ({"a" * 600: entry()}, b"1234", "is no name"),
        (TWICE, b"1", "key 'a' stands there twice"),
    ],
)
def test_hostile_headers(tmp_path, header, body, text):
    with pytest.raises(UserError, match=text):
        raw(tmp_path / "f", header, body)


def test_a_huge_header_length_allocates_nothing(tmp_path):
    for length in (1 << 63, 1 << 40, 99_000_000):
        (tmp_path / "f").write_bytes(length.to_bytes(8, "little") + b"{}")
        with pytest.raises(UserError, match="damaged"):
            TensorFile(tmp_path / "f")


def test_a_dtype_that_torch_has_not_is_named_when_read(tmp_path):
    file = raw(tmp_path / "f", {"a": entry("F4", (2,), (0, 1))}, b"1")
    with pytest.raises(UserError, match="a has dtype F4; expected one of F64"):
        file.read("a")


def test_a_file_cut_while_open_is_named(tmp_path):
    write(tmp_path / "f", {"a": torch.ones(1000)})
    file = TensorFile(tmp_path / "f")
    with open(tmp_path / "f", "r+b") as handle:
        handle.truncate(500)
    with pytest.raises(UserError, match="shorter than when it was opened"):
        file.read("a")
