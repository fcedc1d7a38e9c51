"""Building the libraries, with stand-ins for nvcc and for the wheel: what is cached, what is refused and how."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from minite.backends.cutlass import build, headers, library
from minite.errors import UserError

SM_100A = build.ARCHITECTURES["sm_100a"]

# Notes each call and writes what it was asked for; fails where the file $FAIL names the unit.
STAND_IN = """#!/usr/bin/env bash
if [ "$1" = --version ]; then echo "Cuda compilation tools, release 13.0, V$NVCC_VERSION"; exit; fi
echo "$@" >>"$LOG"
if [ -n "$FAIL" ] && [[ "$*" = *"$FAIL"* ]]; then
    printf 'noise\\ndense.cu(7): error: no such thing\\n' >&2
    exit 1
fi
echo made >"${@: -1}"
"""


@pytest.fixture
def nvcc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for nvcc on the path, headers that need no wheel, an empty cache; the file that notes its calls."""
    program = tmp_path / "bin" / "nvcc"
    program.parent.mkdir()
    program.write_text(STAND_IN)
    program.chmod(0o755)
    log = tmp_path / "log"
    log.touch()
    for name, value in (("LOG", str(log)), ("FAIL", ""), ("NVCC_VERSION", "13.0.88")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("MINITE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(headers, "include_dirs", lambda wheel=None: [tmp_path / "include"])
    return log


def calls(log: Path) -> list[str]:
    return log.read_text().splitlines()


def silent(line: str) -> None:
    pass


def test_a_library_is_built_once(nvcc):
    said: list[str] = []
    made = build.build(SM_100A, report=said.append)
    assert made.is_file() and build.library_file(SM_100A) == made
    *units, link = calls(nvcc)
    assert len(units) == len(build.UNITS) and all("arch=compute_100a,code=sm_100a" in call for call in units)
    assert all("-DMINITE_ARCHITECTURE=100" in call and "-fmad=false" in call for call in units)
    assert link.startswith("-shared -cudart=static")
    assert [line for line in said if line.startswith("sm_100a: grouped.cu, 0 s")]
    assert build.build(SM_100A, report=silent) == made and len(calls(nvcc)) == 4
    assert not [p for p in made.parent.iterdir() if p.is_dir()]  # nothing half made is left


def test_only_what_changed_is_compiled_again(nvcc, monkeypatch, tmp_path):
    sources = tmp_path / "csrc"
    shutil.copytree(build.CSRC, sources)
    monkeypatch.setattr(build, "CSRC", sources)
    first = build.build(SM_100A, report=silent)
    (sources / "nvfp4.cuh").write_text((sources / "nvfp4.cuh").read_text() + "// changed\n")
    assert build.library_file(SM_100A) is None  # the library of the old sources is not taken for one of the new
    assert build.build(SM_100A, report=silent) != first
    unit, _link = calls(nvcc)[4:]
    assert "quantize.cu" in unit
    (sources / "abi.h").write_text((sources / "abi.h").read_text() + "// changed\n")  # everything includes it
    build.build(SM_100A, report=silent)
    assert len(calls(nvcc)) == 10


def test_another_nvcc_and_another_architecture_build_their_own(nvcc, monkeypatch):
    build.build(SM_100A, report=silent)
    monkeypatch.setenv("NVCC_VERSION", "13.1.2")
    build.build(SM_100A, report=silent)
    build.build(build.ARCHITECTURES["sm_90a"], report=silent)
    assert len(calls(nvcc)) == 12


def test_a_failed_compile_says_where_and_leaves_nothing(nvcc, monkeypatch):
    monkeypatch.setenv("FAIL", "dense.cu")
    with pytest.raises(UserError, match="nvcc failed on dense.cu for sm_100a: dense.cu.7.: error: no such thing"):
        build.build(SM_100A, report=silent)
    assert build.library_file(SM_100A) is None
    monkeypatch.setenv("FAIL", "")
    build.build(SM_100A, report=silent, jobs=3)
    assert sum("quantize.cu" in call for call in calls(nvcc)) == 1  # it was kept


def test_no_nvcc_and_an_old_one_are_said(nvcc, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("NVCC_VERSION", "12.8.93")
    with pytest.raises(UserError, match="nvcc is 12.8.93; expected 13.0 or newer"):
        build.nvcc_version()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert build.main(["--arch", "sm_100a"]) == 2
    said = capsys.readouterr().err
    assert (
        said.startswith("minite: error: nvcc is not on the PATH; install the CUDA toolkit 13.0")
        and said.count("\n") == 1
    )


def test_the_command_lists_the_architectures():
    command = [sys.executable, "-m", "minite.backends.cutlass.build", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "scripts/build_kernels" in text and all(name in text for name in build.ARCHITECTURES)


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small wheel with the right folders, whose hash headers.py is told to expect; an empty cache."""
    path = tmp_path / "nvidia_cutlass-4.2.0.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("cutlass_library/source/include/cutlass/cutlass.h", "// a header")
        archive.writestr("cutlass_library/source/tools/util/include/util.h", "// another")
        archive.writestr("cutlass_library/source/examples/large.cu", "// not needed")
    monkeypatch.setenv("MINITE_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(headers, "SHA256", headers.hashlib.sha256(path.read_bytes()).hexdigest())
    return path


def test_headers_come_out_of_the_wheel_once(wheel):
    include, tools = headers.include_dirs(wheel)
    assert (include / "cutlass" / "cutlass.h").read_text() == "// a header" and (tools / "util.h").is_file()
    assert not list(include.parents[1].rglob("*.cu"))
    wheel.unlink()
    assert headers.include_dirs() == [include, tools]


def test_a_wheel_with_other_bytes_is_refused(wheel, tmp_path):
    with wheel.open("ab") as file:
        file.write(b"\0")
    with pytest.raises(UserError, match=r"has SHA-256 .*; expected .*, the wheel of nvidia-cutlass==4.2.0.0"):
        headers.include_dirs(wheel)
    with pytest.raises(UserError, match="is not a file; expected the wheel of nvidia-cutlass"):
        headers.include_dirs(tmp_path / "nothing.whl")
    assert not list((tmp_path / "cache").glob("cutlass-*"))


def test_without_a_network_the_way_around_is_said(wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(UserError, match=r"pip could not download nvidia-cutlass==4.2.0.0: .*pass it with --wheel FILE"):
        headers.include_dirs()


def test_structs_are_laid_out_as_in_c(tmp_path):
    """ctypes against the host compiler, field by field."""
    if shutil.which("g++") is None:
        pytest.skip("no g++ on the path")
    pairs = (
        ("MiniteGemm", library.GemmCall),
        ("MiniteScales", library.ScalesCall),
        ("MiniteQuantize", library.QuantizeCall),
        ("MinitePermute", library.PermuteCall),
        ("MiniteCombine", library.CombineCall),
    )
    lines = [f"sizeof({c})" for c, _ in pairs]
    lines += [f"offsetof({c}, {field[0]})" for c, python in pairs for field in python._fields_]
    body = "".join(f'std::printf("%zu\\n", {line});' for line in lines)
    source = tmp_path / "sizes.cpp"
    source.write_text(f'#include <cstddef>\n#include <cstdio>\n#include "abi.h"\nint main() {{ {body} }}\n')
    subprocess.run(["g++", f"-I{build.CSRC}", str(source), "-o", str(tmp_path / "sizes")], check=True)
    printed = subprocess.run([str(tmp_path / "sizes")], capture_output=True, text=True, check=True).stdout
    expected = [ctypes.sizeof(python) for _, python in pairs]
    expected += [getattr(python, field[0]).offset for _, python in pairs for field in python._fields_]
    assert [int(line) for line in printed.split()] == expected


def test_two_that_extract_at_once_both_find_headers(wheel, monkeypatch):
    extract = headers._extract

    def slower_than_another(wheel: Path, to: Path) -> Path:
        monkeypatch.setattr(headers, "_extract", extract)
        headers.include_dirs(wheel)
        return extract(wheel, to)

    monkeypatch.setattr(headers, "_extract", slower_than_another)
    include, _ = headers.include_dirs(wheel)
    assert (include / "cutlass" / "cutlass.h").is_file() and len(list(include.parents[3].iterdir())) == 1
