"""sync.checkpoint: an index is believed only as far as the files say the same; nothing outside is read."""

import json
import os

import pytest
import torch
from safetensors.torch import save_file

from minite.errors import UserError
from minite.sync.checkpoint import INDEX, Checkpoint, CheckpointWriter
from minite.sync.verify import compare

A, B = {"a": torch.arange(6.0).reshape(2, 3)}, {"b": torch.ones(4, dtype=torch.uint8)}


def directory(path, index=None):
    """Two files, and an index when one is given: an object, or text as it stands."""
    path.mkdir()
    save_file(A, path / "1.safetensors")
    save_file(B, path / "2.safetensors")
    if index is not None:
        (path / INDEX).write_text(index if isinstance(index, str) else json.dumps(index))
    return path


def test_without_an_index_every_file_is_read_and_with_one_those_it_lists(tmp_path):
    assert Checkpoint(directory(tmp_path / "all")).names == {"a", "b"}
    disk = Checkpoint(directory(tmp_path / "some", {"weight_map": {"b": "2.safetensors"}}))
    assert disk.names == {"b"} and torch.equal(disk.read("b"), B["b"])
    with pytest.raises(UserError, match="has no tensor a"):
        disk.read("a")


def test_a_part_of_the_first_axis(tmp_path):
    disk = Checkpoint(directory(tmp_path / "d"))
    assert torch.equal(disk.read("a", 1, 1), A["a"][1:2]) and disk.read("a", 1, 0).shape == (0, 3)


@pytest.mark.parametrize(
    ("index", "text"),
    [
        ("{", "not readable as JSON"),
        ("[1]", "holds a list; expected a JSON object"),
        ("[" * 100_000, "not readable as JSON"),
        ("{}", "expected weight_map to be an object"),
        ({"weight_map": {}}, "expected weight_map to be an object"),
        ({"weight_map": ["a"]}, "expected weight_map to be an object"),
        ({"weight_map": {"a": 1}}, "expected weight_map to be an object"),
        ({"weight_map": {"a": "../d/1.safetensors"}}, "lists '../d/1.safetensors'; expected the plain name"),
        ({"weight_map": {"a": "/etc/1.safetensors"}}, "expected the plain name"),
        ({"weight_map": {"a": "a\0.safetensors"}}, "expected the plain name"),
        ({"weight_map": {"a": ".."}}, "expected the plain name"),
        ({"weight_map": {"a": "config.json"}}, "expected the plain name of a .safetensors"),
        ({"weight_map": {"a": "3.safetensors"}}, "3.safetensors is missing"),
        ({"weight_map": {"b": "1.safetensors"}}, "b is in 1.safetensors, which has no such tensor"),
        ({"weight_map": {"a": "1.safetensors", "b": "1.safetensors"}}, "b is in 1.safetensors, which has no such"),
    ],
)
def test_an_index_that_lies_is_named(tmp_path, index, text):
    with pytest.raises(UserError, match=text):
        Checkpoint(directory(tmp_path / "d", index))


def test_a_tensor_in_two_files_is_named(tmp_path):
    path = directory(tmp_path / "d")
    save_file(A, path / "3.safetensors")
    with pytest.raises(UserError, match="a is in both 1.safetensors and 3.safetensors"):
        Checkpoint(path)


@pytest.mark.parametrize("listed", [True, False])
def test_links_lead_out_only_to_the_blobs_of_a_cache(tmp_path, listed):
    secret = tmp_path / "secret.safetensors"
    save_file({"s": torch.ones(1)}, secret)
    path = directory(tmp_path / "d", {"weight_map": {"s": "s.safetensors"}} if listed else None)
    os.symlink(secret, path / "s.safetensors")
    with pytest.raises(UserError, match=r"s.safetensors: leads to .*secret.safetensors; expected a file in"):
        Checkpoint(path)
    os.unlink(path / "s.safetensors")
    os.symlink("s.safetensors", path / "s.safetensors")
    with pytest.raises(UserError, match=r"s.safetensors: cannot be read"):
        Checkpoint(path)

    blobs, snapshot = tmp_path / "cache" / "blobs", tmp_path / "cache" / "snapshots" / "1"
    blobs.mkdir(parents=True), snapshot.mkdir(parents=True)
    save_file({"s": torch.ones(1)}, blobs / "0123")
    os.symlink("../../blobs/0123", snapshot / "model.safetensors")
    assert Checkpoint(snapshot).names == {"s"}


def test_an_index_that_is_a_link_out_is_not_read(tmp_path):
    path = directory(tmp_path / "d")
    (tmp_path / "other.json").write_text("{}")
    os.symlink(tmp_path / "other.json", path / INDEX)
    with pytest.raises(UserError, match="leads to"):
        Checkpoint(path)


def test_what_is_no_file_is_named(tmp_path):
    path = directory(tmp_path / "d")
    (path / "3.safetensors").mkdir()
    with pytest.raises(UserError, match=r"3.safetensors: leads to"):
        Checkpoint(path)
    with pytest.raises(UserError, match=r"no \*\.safetensors file"):
        Checkpoint(tmp_path / "nowhere")


def test_the_fingerprint_is_that_of_the_content(tmp_path):
    first = Checkpoint(directory(tmp_path / "d")).fingerprint()
    assert Checkpoint(directory(tmp_path / "copy")).fingerprint() == first
    for i, change in enumerate(({"a": A["a"] + 1}, {"a": A["a"].reshape(3, 2)}, {"c": A["a"]}, {"a": A["a"].int()})):
        path = directory(tmp_path / str(i))
        save_file(change, path / "1.safetensors")
        assert Checkpoint(path).fingerprint() != first


def test_writer_cuts_files_and_reads_back(tmp_path):
    tensors = {f"t{i}": torch.full((i + 1, 16), float(i)) for i in range(9)}
    with CheckpointWriter(tmp_path / "out", file_bytes=600) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and all(f.stat().st_size < 600 + 400 for f in files[:-1])
    disk = Checkpoint(tmp_path / "out")
    assert compare({n: disk.read(n) for n in disk.names}, tensors) is None
    with pytest.raises(UserError, match="has no tensor nothing"):
        disk.read("nothing")
