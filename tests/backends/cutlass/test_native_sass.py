"""The machine code that nvcc makes of csrc, without a GPU: which instructions are in it and which must not be.

Compiles with the real nvcc into the cache directory, so a second run takes seconds. From nothing a file of GEMMs takes
minutes of CPU time and 6 to 8 GB: those tests are marked nvcc_gemm and run only when asked for by that name. They are
all in this file, which one process runs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from disassembly import kernels

from minite.backends.cutlass import build, headers, library
from minite.errors import UserError

pytestmark = [pytest.mark.needs_nvcc, pytest.mark.slow, pytest.mark.timeout(1800)]

NATIVE = ("sm_100a", "sm_103a")
FP4_MMA = re.compile(r"UTCOMMA(\.2CTA)?\.(4X|BLOCK16)$")  # one scale per 16 columns; sm_103a calls .4X .BLOCK16
SPILL = re.compile(r"(STL|LDL)(\.|$)")


def toolchain() -> tuple[str, list[Path]]:
    """The version of nvcc and the include folders; skips where one of them cannot be had."""
    if shutil.which("nvcc") is None:
        pytest.skip("no nvcc on the path")
    try:
        return build.nvcc_version(), headers.include_dirs()
    except UserError as error:
        pytest.skip(str(error))


def compiled(unit: str, architecture: str) -> dict[str, list[str]]:
    version, includes = toolchain()
    made: Path = build.compile_unit(unit, build.ARCHITECTURES[architecture], includes, version)
    return kernels(made)


def gemms(unit: str, architecture: str) -> dict[str, list[str]]:
    """The CUTLASS kernels of a unit, without those that write metadata."""
    found = {name: code for name, code in compiled(unit, architecture).items() if "device_kernel" in name}
    assert len(found) == 3, list(found)  # narrow and wide tiles to BF16, narrow ones to float32
    return found


def spills(code: list[str]) -> list[str]:
    return [name for name in code if SPILL.match(name)]


@pytest.mark.nvcc_gemm
@pytest.mark.parametrize("architecture", NATIVE)
@pytest.mark.parametrize("unit", ["grouped.cu", "dense.cu"])
def test_gemms_multiply_fp4_with_a_scale_per_16_columns(unit, architecture):
    found = gemms(unit, architecture)
    assert sum("2x1SM" in name for name in found) == 1, list(found)
    for name, code in found.items():
        products = {instruction for instruction in code if re.match(r"UTC\w*MMA", instruction)}
        assert products and all(FP4_MMA.match(p) for p in products), f"{name}: {products}"
        assert any(".2CTA" in p for p in products) == ("2x1SM" in name), name  # two multiprocessors on one tile
        assert any(i.startswith("UTCCP") for i in code), f"{name}: no scales are copied to tensor memory"
        assert spills(code) == [], name


@pytest.mark.nvcc_gemm
@pytest.mark.parametrize("unit", ["grouped.cu", "dense.cu"])
def test_sm_103a_multiplies_96_columns_an_instruction(unit):
    """K = 96 is in an operand of the instruction, not in its name, so the kernels' names are asked."""
    for name in gemms(unit, "sm_103a"):
        assert "SM103_MXF4_ULTRA" in name and "MainloopSm103" in name and "Li768E" in name, name


@pytest.mark.gpu  # compiled where it is run; elsewhere this time is kept for what cannot be run
@pytest.mark.parametrize("unit", ["grouped.cu", "dense.cu"])
def test_the_twin_multiplies_bf16_and_sums_in_float32(unit):
    for name, code in gemms(unit, "sm_90a").items():
        products = {instruction for instruction in code if instruction.startswith("HGMMA")}
        assert products and all(re.search(r"\.F32\.BF16", p) for p in products), f"{name}: {products}"
        assert spills(code) == [], name


@pytest.mark.parametrize("architecture", build.ARCHITECTURES)
def test_quantizers_keep_rows_in_registers_and_convert_in_hardware_where_there_is_some(architecture):
    found = compiled("quantize.cu", architecture)
    assert len(found) == 13, list(found)
    for name, code in found.items():
        assert spills(code) == [], name
        if "quantize" in name:
            assert any("E4M3" in i for i in code), f"{name}: scales are rounded in software"
            assert any("E2M1" in i for i in code) == (architecture in NATIVE), name
        if "quantize_rows" in name:
            assert any(re.match(r"LDG\.E\.128", i) for i in code), f"{name}: narrow loads"
        if "norm" in name:
            assert any(i.startswith("DFMA") for i in code), f"{name}: squares are not summed in float64"


@pytest.mark.nvcc_gemm
@pytest.mark.parametrize("architecture", NATIVE)
def test_operands_lie_where_the_kernels_look_for_them(architecture, tmp_path):
    """CuTe layouts of the very kernel types of csrc, evaluated on the host: operand_layout.cu."""
    _, includes = toolchain()
    number, program = architecture.removeprefix("sm_"), tmp_path / "operand_layout"
    target = [f"-gencode=arch=compute_{number},code=sm_{number}"]
    target.append(f"-DMINITE_ARCHITECTURE={build.ARCHITECTURES[architecture].number}")
    flags = [
        "-std=c++17",
        "-O1",
        "-w",
        "--expt-relaxed-constexpr",
        f"-I{build.CSRC}",
        *(f"-I{path}" for path in includes),
    ]
    source = Path(__file__).with_name("operand_layout.cu")
    subprocess.run(["nvcc", *flags, *target, str(source), "-o", str(program)], check=True)
    printed = subprocess.run([str(program)], capture_output=True, text=True)
    assert printed.returncode == 0, printed.stdout
    compared, mistakes = re.search(r"(\d+) compared, (\d+) mistakes", printed.stdout).groups()
    assert int(compared) > 1_000_000 and mistakes == "0"


@pytest.mark.nvcc_gemm
@pytest.mark.parametrize("architecture", NATIVE)
def test_a_library_loads_and_answers_without_a_gpu(architecture):
    toolchain()
    wanted = build.ARCHITECTURES[architecture]
    loaded = library.Library(build.build(wanted, report=lambda line: None))
    assert loaded.architecture == wanted.number
    call = library.GemmCall(m=4096, n=1536, k=2048, groups=128, multiprocessors=148, alpha=1.0)
    for call.config in range(3):
        assert loaded.workspace(call, grouped=False) < 2**20
        assert 0 < loaded.workspace(call, grouped=True) < 2**24
        with pytest.raises(RuntimeError, match="workspace is smaller"):
            loaded.gemm(call, grouped=True)
    call.config = 3
    with pytest.raises(RuntimeError, match="no such kernel"):
        loaded.workspace(call, grouped=True)
