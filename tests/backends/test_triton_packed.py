"""GEMMs from packed weights on a GPU. BITWISE: they add up as the GEMM from dequantized weights does, in any tile."""

from __future__ import annotations

import pytest
import torch
from cases import normal, seeded
from tolerances import assert_same_bytes

pytest.importorskip("triton", reason="the Triton backend needs the package triton")
pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned_memory")]

ROWS = (
    [0, 0, 40, 1, 0, 7, 130, 9],
    [5] * 8,
    [0] * 7 + [300],
    [1] + [0] * 7,
    [0] * 8,
)
TILES = [(8, 1), (8, 2), (16, 2), (24, 2), (32, 1), (48, 2), (64, 2), (80, 2), (96, 2), (152, 2)]
SHAPES_NK = [(1536, 2048), (2048, 768), (16, 128), (144, 384)]  # Qwen3-30B-A3B; the smallest; N no multiple of a tile


@pytest.fixture(scope="module")
def backend():
    from minite.backends.triton.backend import TritonBackend

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("packed.cu is for sm_90")
    return TritonBackend(strict=False)


def weight(backend, *shape, how="nvfp4_1d"):
    """Blocks of every size, so that scales reach E4M3 subnormals and zero under codes that are not."""
    size = torch.exp2(torch.randint(-18, 3, (*shape[:-1], shape[-1] // 16), generator=seeded(1)).float())
    return backend.quantize((normal(*shape, seed=2) * size.repeat_interleave(16, -1)).bfloat16().cuda(), how)


def rows_of(backend, rows, k, input):
    size = torch.exp2(torch.randint(-6, 7, (rows, 1), generator=seeded(3))).bfloat16()
    return backend.quantize((normal(rows, k, seed=4) * size).cuda(), input)


@pytest.mark.parametrize("input", ["nvfp4_row", "nvfp4_tensor", "bf16", "mxfp8"])
@pytest.mark.parametrize(("n", "k"), SHAPES_NK)
def test_experts_have_the_bits_of_the_dequantized_weight(backend, n, k, input):
    from minite.backends.triton import packed

    q = weight(backend, 8, n, k)
    b = backend.prepare(q, decode=True)
    assert isinstance(b, packed.Packed)
    for rows in ROWS:
        a, rows_E = rows_of(backend, sum(rows), k, input), torch.tensor(rows, device="cuda")
        for out_dtype in (torch.bfloat16, torch.float32):
            wanted = backend.grouped_gemm(a, backend.prepare(q), rows_E, out_dtype)
            assert_same_bytes(backend.grouped_gemm(a, b, rows_E, out_dtype), wanted, str(rows))
            for tile in TILES:
                got = packed.gemm(backend._read(a), b, out_dtype, rows_E, packed.Tile(*tile))
                assert_same_bytes(got, wanted, f"{rows} {tile}")


@pytest.mark.parametrize("how", ["nvfp4_1d", "nvfp4_2d", "nvfp4_1d_4o6"])
@pytest.mark.parametrize("rows", [1, 3, 8, 65, 200, 600])
def test_a_matrix_has_the_bits_of_the_dequantized_weight(backend, how, rows):
    for n, k in ((5120, 2048), (64, 128)):
        q = weight(backend, n, k, how=how)
        a = rows_of(backend, rows, k, "nvfp4_row")
        for out_dtype in (torch.bfloat16, torch.float32):
            wanted = backend.gemm(a, backend.prepare(q), out_dtype)
            assert_same_bytes(backend.gemm(a, backend.prepare(q, decode=True), out_dtype), wanted, f"{n} {k}")


@pytest.mark.parametrize(("n", "k"), [(128, 64), (40, 128)])
def test_shapes_that_cannot_be_packed_are_dequantized(backend, n, k):
    from minite.backends.reference import Prepared

    assert isinstance(backend.prepare(weight(backend, n, k), decode=True), Prepared)


def test_float32_rows_are_multiplied_by_the_dequantized_weight(backend):
    q = weight(backend, 64, 128)
    x = normal(5, 128, dtype=torch.float32).cuda()
    out = backend.gemm(x, backend.prepare(q, decode=True), torch.float32)
    assert_same_bytes(out, backend.gemm(x, backend.prepare(q), torch.float32))


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize(("n", "k"), [(64, 64), (1536, 2048), (2048, 4096)])
def test_a_row_has_the_same_bits_in_any_batch(backend, n, k, quantized):
    """Of any tile and of both kernels: the sum runs over K in steps of 16, in order."""
    how = ("nvfp4_1d", "nvfp4_row") if quantized else ("bf16", "bf16")
    w = backend.quantize(normal(n, k, seed=5).cuda(), how[0])
    x = normal(512, k, seed=6).cuda()
    for decode in (False, True):
        b = backend.prepare(w, decode=decode)
        together = backend.gemm(backend.quantize(x, how[1]), b, torch.float32)
        for rows in (1, 2, 7, 33, 64, 65, 128, 300):
            assert_same_bytes(backend.gemm(backend.quantize(x[:rows], how[1]), b, torch.float32), together[:rows])
