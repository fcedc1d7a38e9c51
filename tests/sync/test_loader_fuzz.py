"""Loaders under random damage: they succeed or say what is wrong in one line; nothing else, and nothing is written.

Damage is done to a small checkpoint: bytes anywhere, headers rebuilt from random parts, random JSON for an index, a
config or a journal. A defect shows as any exception but UserError.
"""

import json
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from disk_model import REFERENCE, save
from foreign_model import tensors
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from small_model import recipe

from minite.errors import UserError
from minite.sync.checkpoint import INDEX
from minite.sync.convert import convert
from minite.sync.convert.partial import JOURNAL
from minite.sync.digests import DIGEST_FILE, verify_directory
from minite.sync.inspect import inspect_directory
from minite.sync.tensor_file import TensorFile

CONFIG = recipe("w4a4")
FILE = "model-00001-of-00002.safetensors"
FUZZ = settings(max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))


@pytest.fixture(scope="module")
def sound():
    """A ModelOpt checkpoint that everything accepts, and has a digest file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sound"
        save(path, {n: t.clone() for n, t in tensors(CONFIG).items()}, CONFIG, quantization_config={"ignore": ["a"]})
        convert(path, Path(folder) / "again", CONFIG, REFERENCE)
        shutil.copyfile(Path(folder) / "again" / DIGEST_FILE, path / DIGEST_FILE)
        yield path


def survives(sound, damage) -> None:
    """Every loader on a damaged copy: done, or UserError; one line; no directory left; no read beyond the files."""
    with tempfile.TemporaryDirectory() as folder:
        path, out = Path(folder) / "d", Path(folder) / "out"
        shutil.copytree(sound, path)
        damage(path)
        largest = max((f.stat().st_size for f in path.iterdir() if f.is_file()), default=0)
        asked = []
        original = TensorFile.bytes_at

        def watched(self, offset, nbytes):
            asked.append(nbytes)
            return original(self, offset, nbytes)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TensorFile, "bytes_at", watched)
            for action in (
                lambda: inspect_directory(path).text(),
                lambda: json.dumps(inspect_directory(path).json()),
                lambda: verify_directory(path),
                lambda: convert(path, out, CONFIG, REFERENCE, "bf16"),
            ):
                try:
                    action()
                except UserError as error:
                    assert len(str(error)) < 2000
                    assert not out.exists() and not (out.parent / "out.partial").exists()
        assert max(asked, default=0) <= largest


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=6), st.booleans())
@FUZZ
def test_bytes_changed(sound, changes, in_header):
    def damage(path):
        data = bytearray((path / FILE).read_bytes())
        size = 8 + int.from_bytes(data[:8], "little") if in_header else len(data)
        for at, value in changes:
            data[int(at * (size - 1))] = value
        (path / FILE).write_bytes(data)

    survives(sound, damage)


@given(st.floats(0, 1), st.binary(max_size=40))
@FUZZ
def test_cut_and_lengthened(sound, at, more):
    def damage(path):
        data = (path / FILE).read_bytes()
        (path / FILE).write_bytes(data[: int(at * len(data))] + more)

    survives(sound, damage)


SIZES = st.one_of(st.integers(-2, 100), st.sampled_from([1 << 31, 1 << 40, 1 << 62, (1 << 64) - 1]))
ENTRY = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from(["F32", "BF16", "U8", "F8_E4M3", "F4", "X", ""]),
        "shape": st.lists(SIZES, max_size=9),
        "data_offsets": st.lists(SIZES, min_size=1, max_size=3),
    }
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(sorted(tensors(CONFIG))) | st.text(max_size=12)


@given(st.dictionaries(NAMES, ENTRY | JSON, max_size=4), st.integers(0, 64), st.none() | SIZES)
@FUZZ
def test_headers_made_up(sound, header, body, length):
    def damage(path):
        text = json.dumps(header).encode()
        size = (len(text) if length is None else length) % (1 << 64)
        (path / FILE).write_bytes(size.to_bytes(8, "little") + text + b"\0" * body)

    survives(sound, damage)


PATHS = st.sampled_from(
    [FILE, "../d/" + FILE, "/etc/passwd", "..", ".", "", "a\0b.safetensors", "x" * 300 + ".safetensors", "config.json"]
)


@given(JSON | st.fixed_dictionaries({"weight_map": st.dictionaries(NAMES, PATHS | JSON, max_size=4) | JSON}))
@FUZZ
def test_indexes_made_up(sound, index):
    survives(sound, lambda path: (path / INDEX).write_text(json.dumps(index)))


@given(
    st.sampled_from(["config.json", "hf_quant_config.json", DIGEST_FILE]),
    JSON
    | st.fixed_dictionaries(
        {
            key: JSON | st.fixed_dictionaries({"ignore": st.lists(NAMES | JSON, max_size=4), "config_groups": JSON})
            for key in ("quantization_config", "quantization", "tensors", "disk_only")
        }
    ),
)
@FUZZ
def test_configs_made_up(sound, name, data):
    survives(sound, lambda path: (path / name).write_text(json.dumps(data)))


@given(st.lists(JSON | st.fixed_dictionaries({"file": PATHS | JSON, "size": JSON, "sent": JSON}), max_size=3))
@FUZZ
def test_journals_made_up(sound, lines):
    with tempfile.TemporaryDirectory() as folder:
        partial = Path(folder) / "out.partial"
        partial.mkdir()
        (partial / JOURNAL).write_text("".join(json.dumps(line) + "\n" for line in lines))
        try:
            convert(sound, Path(folder) / "out", CONFIG, REFERENCE)
        except UserError as error:
            assert "start over with: rm -r" in str(error)
        else:
            assert not lines


@given(st.lists(st.tuples(st.sampled_from(sorted(tensors(CONFIG))), st.integers(0, 255)), min_size=1, max_size=4))
@FUZZ
def test_values_made_up(sound, changes):
    """Scales of NaN, 0, Inf and any other bytes."""

    def damage(path):
        named = {name: tensor.clone() for name, tensor in tensors(CONFIG).items()}
        for name, value in changes:
            named[name].reshape(-1).view(torch.uint8).fill_(value)
        for file in path.glob("*.safetensors"):
            file.unlink()
        (path / INDEX).unlink()
        save_file(named, path / "model.safetensors")

    survives(sound, damage)
