"""The arithmetic of the CUDA quantizers, compiled by the host compiler, against minite.formats. BITWISE.

The same header runs on the device, where two things differ: scales are rounded by `cvt` (sm_90 and newer) and codes by
`cvt ... e2m1x2` (sm_100 and newer), both defined to round as the text here does. test_native_gpu.py looks at those.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from cases import EDGE_INPUTS, normal, seeded
from tolerances import assert_same_bytes
from torch import Tensor

from minite.backends.cutlass.build import CSRC
from minite.formats import layout, nvfp4
from minite.formats.rounding import e2m1_code, e4m3


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler on the path")
    library = tmp_path_factory.mktemp("host") / "libnvfp4_host.so"
    source = Path(__file__).with_name("nvfp4_host.cpp")
    # -ffp-contract=off: as -fmad=false on the device, no multiply-add that is not written out
    flags = ["-std=c++17", "-O2", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run([compiler, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def pointer(x: Tensor) -> ctypes.c_void_p:
    assert x.is_contiguous()
    return ctypes.c_void_p(x.data_ptr())


def near(values: list[float]) -> Tensor:
    """The values, three float32 neighbours on either side of each, and all that negated."""
    x = torch.tensor(values, dtype=torch.float32)
    bits = (x.view(torch.int32).unsqueeze(-1) + torch.arange(-3, 4, dtype=torch.int32)).flatten()
    x = torch.cat((bits.view(torch.float32), torch.zeros(1)))
    return torch.cat((x, -x))


def many_floats() -> Tensor:
    """Random bit patterns, NaN and infinity among them, and every sign and exponent with random mantissas."""
    bits = torch.randint(-(2**31), 2**31, (2**18,), generator=seeded(0), dtype=torch.int64)
    exponents = torch.arange(512).repeat_interleave(64) << 23
    mantissas = torch.randint(0, 2**23, exponents.shape, generator=seeded(1))
    specials = torch.tensor([torch.inf, -torch.inf, torch.nan, 0.0, -0.0])
    spread = (exponents + mantissas).int().view(torch.float32)
    return torch.cat((bits.to(torch.int32).view(torch.float32), spread, specials))


def test_e2m1_rounds_as_the_reference(host):
    x = torch.cat((many_floats(), near([0.25, 0.5, 0.75, 1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 7])))
    out = torch.full((x.numel(),), 255, dtype=torch.uint8)
    host.e2m1_codes(pointer(x), ctypes.c_int64(x.numel()), pointer(out))
    assert_same_bytes(out, e2m1_code(x))


def test_e4m3_rounds_and_reads_as_the_reference(host):
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = ((values[1:] + values[:-1]) / 2).tolist()
    x = torch.cat((many_floats(), near([*ties, 2.0**-10, 2.0**-9, 2.0**-6, 448, 464, 480])))
    x = x[~x.isnan()].abs().contiguous()
    out, back = torch.full((x.numel(),), 255, dtype=torch.uint8), torch.full_like(x, torch.nan)
    host.e4m3_codes(pointer(x), ctypes.c_int64(x.numel()), pointer(out), pointer(back))
    assert_same_bytes(out, e4m3(x).view(torch.uint8))
    assert_same_bytes(back, e4m3(x).float())


def test_bf16_rounds_as_torch(host):
    x = torch.cat((many_floats(), near([1.00390625, 1.01171875])))
    out = torch.zeros(x.numel(), dtype=torch.int16)
    host.to_bf16(pointer(x), ctypes.c_int64(x.numel()), pointer(out))
    numbers = ~x.isnan()
    assert_same_bytes(out[numbers], x[numbers].bfloat16().view(torch.int16))
    assert bool(out.view(torch.bfloat16)[~numbers].isnan().all())


def quantized(host: ctypes.CDLL, x_MK: Tensor, block_rows: int, amax_M: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, linear scales, amax by row) as the header computes them; buffers are poisoned first."""
    rows, k = x_MK.shape
    amax = torch.full((rows,), torch.nan) if amax_M is None else amax_M.clone()
    codes = torch.full((rows, k // 2), 0xA5, dtype=torch.uint8)
    padded_rows, padded_columns = layout.padded_shape(rows, k // 16)
    tiles = torch.full((padded_rows * padded_columns,), 0x7F, dtype=torch.uint8)
    sizes = (ctypes.c_int64(rows), ctypes.c_int(k), ctypes.c_int(block_rows), ctypes.c_bool(amax_M is None))
    host.quantize(pointer(x_MK), *sizes, pointer(amax), pointer(codes), pointer(tiles))
    return codes, layout.unswizzle(tiles, rows, k // 16).view(torch.float8_e4m3fn), amax


INPUTS = {"normal": lambda m, k, dtype: normal(m, k, seed=10, dtype=dtype), **EDGE_INPUTS}


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("shape_MK", [(1, 16), (33, 80), (130, 256)], ids=str)
def test_row_scaled_codes_scales_and_amax(host, make, shape_MK):
    rows, k = shape_MK
    x_MK = make(max(rows, 8), max(k, 64), torch.bfloat16)[-rows:, :k].contiguous()
    expected = nvfp4.quantize(x_MK, (1, 16), "row")
    codes, scales, amax = quantized(host, x_MK, 1, None)
    assert_same_bytes(amax, expected.amax, "amax")
    assert_same_bytes(scales, expected.block_scale, "scales")
    assert_same_bytes(codes, expected.codes, "codes")


@pytest.mark.parametrize("make", INPUTS.values(), ids=INPUTS)
@pytest.mark.parametrize("block", [(1, 16), (16, 16)], ids=["1d", "2d"])
def test_one_outer_scale(host, make, block):
    x_MK = make(48, 96, torch.bfloat16)
    expected = nvfp4.quantize(x_MK, block, "tensor")
    codes, scales, _ = quantized(host, x_MK, block[0], expected.amax.repeat(48))
    assert_same_bytes(scales, expected.block_scale, "scales")
    assert_same_bytes(codes, expected.codes, "codes")


def test_every_bf16_value_in_blocks_of_every_size(host):
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = bits.view(torch.bfloat16)
    x_MK = values[values.isfinite()]
    x_MK = torch.cat((x_MK, x_MK[torch.randperm(x_MK.numel(), generator=seeded(2))])).view(-1, 256)
    expected = nvfp4.quantize(x_MK, (1, 16), "row")
    codes, scales, amax = quantized(host, x_MK, 1, None)
    assert_same_bytes(amax, expected.amax, "amax")
    assert_same_bytes(scales, expected.block_scale, "scales")
    assert_same_bytes(codes, expected.codes, "codes")


@pytest.mark.parametrize("bad", [torch.inf, torch.nan], ids=str)
def test_infinity_and_nan_show_in_the_amax(host, bad):
    x_MK = normal(3, 64, seed=11)
    x_MK[1, 20] = bad
    _, _, amax = quantized(host, x_MK, 1, None)
    assert amax.isfinite().tolist() == [True, False, True]
    assert_same_bytes(amax[1], x_MK[1].float().abs().amax())


def test_a_measured_amax_of_infinity_quantizes_as_the_kernels_of_transformer_engine(host):
    x_MK = normal(2, 32, seed=12)
    x_MK[0, 3], x_MK[1, 20] = torch.inf, -torch.inf
    expected = nvfp4.quantize(x_MK, (1, 16), "row", nonfinite="te")
    codes, scales, _ = quantized(host, x_MK, 1, None)
    assert_same_bytes(scales, expected.block_scale, "scales")
    assert_same_bytes(codes, expected.codes, "codes")
