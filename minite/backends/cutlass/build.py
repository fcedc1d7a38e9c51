"""Builds the libraries of the backend "native": one shared library per architecture, without torch and without a GPU.

`scripts/build_kernels` runs this. Objects and libraries are kept in the cache directory under the hash of everything
that made them: sources, headers, flags and the version of nvcc.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from minite.backends.cutlass import headers
from minite.config.env import cache_dir
from minite.errors import UserError

CSRC = Path(__file__).with_name("csrc")
UNITS = ("quantize.cu", "dense.cu", "grouped.cu")
FLAGS = (
    "-std=c++17", "-O3", "-DNDEBUG", "--expt-relaxed-constexpr",
    "-fmad=false",  # the quantizers' arithmetic is a contract; CUTLASS's main loops hold no scalar multiply-adds
    "-diag-suppress=20012",  # the only warning that CUTLASS's own headers give
    "-Xcompiler=-fPIC,-fvisibility=hidden,-fno-strict-aliasing",
)  # fmt: skip
LINK = ("-shared", "-cudart=static", "-Xlinker=--exclude-libs=ALL")


@dataclass(frozen=True)
class Architecture:
    """A chip that a library is for."""

    name: str
    number: int  # 10 * major + minor of its compute capability
    about: str


ARCHITECTURES = {
    a.name: a
    for a in (
        Architecture("sm_90a", 90, "H100, H200: BF16 twin of the GEMMs, the same quantizers"),
        Architecture("sm_100a", 100, "B200, GB200"),
        Architecture("sm_103a", 103, "B300, GB300: 96 columns an instruction"),
    )
}


def nvcc_version() -> str:
    """ "13.0.88" for instance. UserError without a usable nvcc."""
    if shutil.which("nvcc") is None:
        raise UserError(
            "nvcc is not on the PATH; install the CUDA toolkit 13.0 or newer and add its bin folder to PATH"
        )
    text = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    version = text.rpartition(", V")[2].split()[0]
    if int(version.split(".")[0]) < 13:
        raise UserError(f"nvcc is {version}; expected 13.0 or newer, which knows sm_103a")
    return version


def sources_digest() -> str:
    """Of everything that a library's numbers depend on, but for the compiler's version."""
    parts = [str(FLAGS), str(LINK), headers.SHA256]
    parts += [f"{path.name}\0{path.read_text(encoding='utf-8')}" for path in sorted(CSRC.iterdir())]
    return _digest(parts)


def library_file(architecture: Architecture) -> Path | None:
    """The newest library of these sources that has been built, by whichever nvcc; None if there is none."""
    built = list(_home().glob(f"libminite_{architecture.name}-{sources_digest()}-*.so"))
    return max(built, key=lambda path: path.stat().st_mtime, default=None)


def build(
    architecture: Architecture, *, wheel: Path | None = None, jobs: int = 1, report: Callable[[str], None] = print
) -> Path:
    """The library of one architecture, compiled if it is not there yet; ``jobs``: files that are compiled at once."""
    version = nvcc_version()
    library = _home() / f"libminite_{architecture.name}-{sources_digest()}-{version}.so"
    if library.is_file():
        report(f"{architecture.name}: up to date, {library}")
        return library
    includes = headers.include_dirs(wheel)
    report(f"{architecture.name}: compiling {', '.join(UNITS)}; minutes each")

    def timed(unit: str) -> Path:
        started = time.monotonic()
        made = compile_unit(unit, architecture, includes, version)
        report(f"{architecture.name}: {unit}, {time.monotonic() - started:.0f} s")
        return made

    with ThreadPoolExecutor(jobs) as pool:
        objects = list(pool.map(timed, UNITS))
    _nvcc([*LINK, *map(str, objects)], library, f"linking {library.name}")
    report(f"{architecture.name}: {library}")
    return library


def compile_unit(unit: str, architecture: Architecture, includes: list[Path], version: str) -> Path:
    """The object of one file of csrc; from the cache if neither it nor a header of ours has changed."""
    digest = _digest([architecture.name, version, headers.SHA256, str(FLAGS), *_with_includes(unit)])
    out = _home() / f"{Path(unit).stem}-{architecture.name}-{digest}.o"
    if not out.is_file():
        number = architecture.name.removeprefix("sm_")
        target = [f"-gencode=arch=compute_{number},code=sm_{number}", f"-DMINITE_ARCHITECTURE={architecture.number}"]
        where = [f"-I{path}" for path in includes]
        _nvcc(["-c", *FLAGS, *target, *where, str(CSRC / unit)], out, f"{unit} for {architecture.name}")
    return out


def main(argv: list[str] | None = None) -> int:
    """The command line of scripts/build_kernels."""
    parser = argparse.ArgumentParser(prog="scripts/build_kernels", description=__doc__)
    known = "; ".join(f"{a.name} ({a.about})" for a in ARCHITECTURES.values())
    names = list(ARCHITECTURES)
    parser.add_argument("--arch", nargs="+", choices=names, default=names, help=f"{known}; default: all")
    wheel_help = f"the wheel of {headers.REQUIREMENT}; default: pip downloads it"
    parser.add_argument("--wheel", type=Path, metavar="FILE", help=wheel_help)
    parser.add_argument(
        "--jobs", type=int, default=1, metavar="N", help="files compiled at once, 6 to 8 GB each; default: 1"
    )
    args = parser.parse_args(argv)
    try:
        for name in args.arch:
            build(ARCHITECTURES[name], wheel=args.wheel, jobs=args.jobs, report=lambda line: print(line, flush=True))
    except UserError as error:
        print(f"minite: error: {error}", file=sys.stderr)
        return 2
    return 0


def _home() -> Path:
    return cache_dir() / "kernels"


def _nvcc(arguments: list[str], out: Path, what: str) -> None:
    """Run nvcc into a file beside ``out``, then move it there: a broken run leaves nothing that looks finished."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as folder:
        made = Path(folder) / out.name
        run = subprocess.run(["nvcc", *arguments, "-o", str(made)], capture_output=True, text=True)
        if run.returncode != 0:
            errors = [line for line in run.stderr.splitlines() if "error" in line.lower()] or run.stderr.splitlines()
            first = errors[0] if errors else f"killed by signal {-run.returncode}; a GEMM needs 6 to 8 GB of memory"
            raise UserError(f"nvcc failed on {what}: {first}")
        os.replace(made, out)


def _with_includes(unit: str) -> list[str]:
    """The text of a file of csrc and of every file of csrc that it includes, directly or not."""
    names = [unit]
    for name in names:  # grows while it is read
        found = re.findall(r'^#include "([^"/]+)"', (CSRC / name).read_text(encoding="utf-8"), re.MULTILINE)
        names += [name for name in found if name not in names]
    return [(CSRC / name).read_text(encoding="utf-8") for name in names]


def _digest(parts: list[str]) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
