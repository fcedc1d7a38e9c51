"""layout.swizzle against CUTLASS's own layout functions, evaluated on the host. BITWISE.

Needs nvcc (no GPU) and CUTLASS headers: `pip install --no-deps nvidia-cutlass==4.2.0.0`, 6 MB, or a FlashInfer wheel.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from minite.formats import layout

SOURCE = Path(__file__).with_name("cutlass_layout.cu")
HEADERS = {"cutlass_library": "source/include", "flashinfer": "data/cutlass/include"}  # package -> folder inside
PROBLEMS = [(rows, k) for rows in (1, 8, 31, 127, 128, 129, 300) for k in (16, 32, 64, 80, 256, 2048, 2080)]


def headers() -> Path | None:
    for package, folder in HEADERS.items():
        spec = importlib.util.find_spec(package)
        for place in (spec.submodule_search_locations if spec else None) or []:
            if (Path(place, folder) / "cutlass" / "detail" / "sm100_blockscaled_layout.hpp").is_file():
                return Path(place, folder)
    return None


@pytest.mark.needs_nvcc
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_swizzle_puts_every_scale_where_cutlass_reads_it(tmp_path):
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on the path")
    include = headers()
    if include is None:
        pytest.skip(f"no CUTLASS headers: none of the packages {', '.join(HEADERS)} is installed with them")
    program = tmp_path / "cutlass_layout"
    compile = ["nvcc", "-std=c++17", "-O0", "-w", "--expt-relaxed-constexpr", f"-I{include}", str(SOURCE)]
    subprocess.run([*compile, "-o", str(program)], check=True)
    problems = "\n".join(f"{rows} {k}" for rows, k in PROBLEMS)
    printed = subprocess.run([str(program)], input=problems, capture_output=True, text=True, check=True).stdout
    lines = printed.splitlines()
    assert len(lines) == len(PROBLEMS)
    for (rows, k), line in zip(PROBLEMS, lines, strict=True):
        columns = k // 16
        size, *offsets = map(int, line.split())
        assert size == layout.swizzle(torch.zeros(rows, columns, dtype=torch.uint8)).numel(), f"{rows} x {k}"
        theirs_A, theirs_B = torch.tensor(offsets).view(2, rows, columns)
        ours = torch.full((size,), -1)
        number = torch.arange(rows * columns).view(rows, columns)
        for byte in range(3):  # scales are bytes, so their numbers are swizzled byte by byte
            part = layout.swizzle(((number + 1) >> (8 * byte) & 0xFF).to(torch.uint8))
            ours += part.long() << (8 * byte)
        for theirs in (theirs_A, theirs_B):
            assert torch.equal(ours[theirs], number), f"{rows} x {k}"
        assert int((ours >= 0).sum()) == number.numel(), f"{rows} x {k}: padding is not zero"
