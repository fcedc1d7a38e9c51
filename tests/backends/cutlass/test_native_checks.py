"""What the native kernels refuse before anything is launched, and with what advice. No GPU, no library."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from cases import normal, seeded
from torch._subclasses.fake_tensor import FakeTensorMode

from minite.backends.cutlass import expert_rows, library, norm, ops, selftest
from minite.backends.cutlass.backend import NativeBackend
from minite.backends.cutlass.checks import check_padding, check_sizes, check_tensor
from minite.backends.cutlass.weights import NativeWeight
from minite.errors import UserError
from minite.formats import FormatError, layout, nvfp4

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("mnk", "message"),
    [
        ((4, 16, 48), "K is 48; expected a multiple of 32; pad the columns"),
        ((4, 12, 64), "N is 12; expected a multiple of 8; pad the weight"),
        ((2**31, 16, 32), "M x K is 2147483648 x 32"),
        ((2**24, 16, 2048), "take 2147483648 bytes; expected fewer than 2147483648"),
        ((16, 2**24, 2048), "N x K is 16777216 x 2048"),
    ],
)
def test_sizes_that_are_refused(mnk, message):
    with pytest.raises(UserError, match=message):
        check_sizes("gemm", *mnk)


@pytest.mark.parametrize("mnk", [(0, 8, 32), (1, 8, 96), (2**20, 1536, 2048), (2**24 - 128, 8, 2048)])
def test_sizes_that_are_taken(mnk):
    check_sizes("gemm", *mnk)


def test_tensors_that_are_refused():
    x = torch.zeros(6, 64, dtype=torch.uint8)
    check_tensor("a", x, torch.uint8, (6, 64), CPU)
    check_tensor("a", torch.zeros(0, 64, dtype=torch.uint8), torch.uint8, (0, 64), CPU)
    for wrong, message in (
        (x.char(), "a: is torch.int8 .6, 64.; expected torch.uint8 .6, 64."),
        (x[:5], "expected torch.uint8 .6, 64."),
        (torch.zeros(64, 6, dtype=torch.uint8).t(), "strides .1, 6.; expected contiguous rows; call .contiguous"),
        (torch.zeros(6 * 64 + 1, dtype=torch.uint8)[1:].view(6, 64), "odd address; expected a multiple of 16 bytes"),
        (x.to("meta"), "is on meta; expected cpu"),
    ):
        with pytest.raises(UserError, match=message):
            check_tensor("a", wrong, torch.uint8, (6, 64), CPU)


@pytest.mark.parametrize("k", [32, 48, 64, 80])
def test_only_zeros_may_pad_the_columns_of_scales(k):
    rows, columns = 130, k // 16
    scales = torch.full((2, rows, columns), 0x7F, dtype=torch.uint8)
    tiles = layout.swizzle(scales)
    check_padding("w", tiles, rows, k)
    padded_rows, padded_columns = layout.padded_shape(rows, columns)
    numbers = torch.zeros(2, padded_rows, padded_columns, dtype=torch.uint8)
    numbers[1, rows:] = 0x7F  # rows that pad hold anything
    check_padding("w", layout.swizzle(numbers), rows, k)
    if columns == padded_columns:
        return
    numbers[1, rows - 1, columns] = 1
    with pytest.raises(UserError, match=f"scales that pad {columns} columns to 4|to 8"):
        check_padding("w", layout.swizzle(numbers), rows, k)


@pytest.mark.parametrize("rows_E", [[3], [0, 5, 0, 128, 129, 1], [0, 0], [300] * 7], ids=str)
def test_offsets_are_those_of_the_layout_and_their_tiles_fit_the_buffer(rows_E):
    sizes = torch.tensor(rows_E)
    offsets = ops.expert_offsets(sizes)
    assert offsets.dtype == torch.int32 and offsets.shape == (2, len(rows_E) + 1)
    assert offsets[0].tolist() == [0, *sizes.cumsum(0).tolist()]
    for columns in (1, 4, 6):
        in_bytes = layout.expert_offsets(sizes, columns)
        width = layout.padded_shape(1, columns)[1]
        assert (offsets[1] * width).tolist() == in_bytes.tolist()
        assert ops.tile_bytes(sum(rows_E), columns, len(rows_E)) >= in_bytes[-1]


def test_the_buffer_of_tiles_is_no_larger_than_some_split_needs():
    assert ops.tile_bytes(3, 4, 128) == 3 * 128 * 4  # three experts with a row each
    assert ops.tile_bytes(257, 4, 2) == 384 * 4  # 1 and 256
    assert ops.tile_bytes(257, 5, None) == 384 * 8
    for rows, experts in ((1, 1), (100, 3), (1000, 8), (4096, 128)):
        bound = ops.tile_bytes(rows, 4, experts)
        ones = min(experts - 1, rows - 1)
        worst = [1] * ones + [rows - ones]
        need = sum(-(-r // 128) * 128 * 4 for r in worst)
        assert need <= bound <= need + 128 * 4 * experts


@pytest.mark.parametrize(
    ("rows", "experts", "n", "dtype", "config"),
    [(1, 1, 4096, torch.bfloat16, 0), (4096, 1, 4096, torch.bfloat16, 1), (4096, 128, 4096, torch.bfloat16, 0),
     (4096, 1, 128, torch.bfloat16, 0), (4096, 1, 4096, torch.float32, 2)],
)  # fmt: skip
def test_choice_of_tiles(rows, experts, n, dtype, config):
    assert ops.choose(rows, experts, n, dtype) == config


def fake(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="cuda")


def test_shapes_without_running():
    with FakeTensorMode():
        x, offsets = fake(300, 96, dtype=torch.bfloat16), fake(2, 9, dtype=torch.int32)
        codes, scales, amax = ops.quantize(x, None, None, False, 1, False)
        assert (codes.shape, scales.shape, amax.shape) == ((300, 48), (300, 6), (300,))
        source_row = fake(500, dtype=torch.int64)
        assert ops.quantize(x, None, offsets, True, 1, True)[1].shape == (ops.tile_bytes(300, 3, 8),)
        once = ops.quantize(fake(40, 48, dtype=torch.bfloat16), None, None, False, 1, False)
        codes, tiles, amax = expert_rows.permute(*once, source_row, offsets)
        assert (codes.shape, tiles.shape, amax.shape) == ((500, 24), (ops.tile_bytes(500, 3, 8),), (500,))
        assert ops.quantize(x, fake(3, dtype=torch.float32), None, False, 1, False)[2].shape == (0,)
        assert ops.swizzle(scales, None).shape == (384 * 8,) and ops.swizzle(scales, offsets).dtype == torch.uint8
        assert ops.amax(x, 4).shape == (4,)
        out = ops.gemm(codes, tiles, amax, fake(8, 64, 24), fake(8, 512), fake(8), offsets, 1.0, torch.bfloat16)
        assert out.shape == (500, 64) and out.dtype == torch.bfloat16
        prob, position = fake(250, 2, dtype=torch.float32), fake(250, 2, dtype=torch.int32)
        assert expert_rows.combine(out, prob, position).shape == (250, 64)


@pytest.mark.parametrize(
    ("shape", "amax", "block_rows", "message"),
    [
        ((4, 40), None, 1, "K is 40; expected a multiple of 16"),
        ((4, 4, 32), None, 1, "x is .4, 4, 32.; expected .R, K."),
        ((32, 32), None, 16, "blocks of 16 rows, 32 rows; expected 1, or 16 with amax"),
        ((24, 32), 1, 16, "blocks of 16 rows, 24 rows"),
        ((24, 32), 5, 1, "amax is .5.; expected .S. where S divides the 24 rows"),
    ],
)
def test_quantizer_refuses(shape, amax, block_rows, message):
    with FakeTensorMode(), pytest.raises(UserError, match=message):
        given = None if amax is None else fake(amax, dtype=torch.float32)
        ops.quantize(fake(*shape, dtype=torch.bfloat16), given, None, False, block_rows, False)


def test_shapes_of_a_norm_and_its_codes():
    with FakeTensorMode():
        x, weight = fake(300, 96, dtype=torch.bfloat16), fake(96, dtype=torch.bfloat16)
        shapes = [t.shape for t in norm.norm_quantize(x, x, weight, 1e-6, True, False)]
        assert shapes == [(300, 96), (300, 96), (300, 48), (300, 6), (300,)]
        total, normed, _, tiles, _ = norm.norm_quantize(x, None, weight, 1e-6, False, True)
        assert (total.shape, normed.shape, tiles.shape) == ((0,), (0,), (ops.tile_bytes(300, 6, None),))


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((4, 40), r"nvfp4_norm_quantize: x is \[4, 40\]; expected \[R, K\] with K a multiple of 16; .*pad the columns"),
        ((4, 4, 32), r"x is \[4, 4, 32\]; expected \[R, K\]"),
        ((4, 0), r"x is \[4, 0\]"),
    ],
)
def test_norm_refuses(shape, message):
    with FakeTensorMode(), pytest.raises(UserError, match=message):
        x = fake(*shape, dtype=torch.bfloat16)
        norm.norm_quantize(x, None, x, 1e-6, False, False)


@pytest.mark.parametrize(
    ("capability", "name"),
    [((9, 0), "sm_90a"), ((10, 0), "sm_100a"), ((10, 3), "sm_103a"), ((8, 9), None), ((12, 0), None)],
)
def test_which_library_a_gpu_runs(capability, name):
    found = library.architecture_of(capability)
    assert (found and found.name) == name


def test_devices_without_kernels_are_refused_with_the_reason(monkeypatch):
    with pytest.raises(UserError, match="run on CUDA devices, not on cpu"):
        library.for_device(CPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (12, 0))
    with pytest.raises(UserError, match="exist for sm_90a, sm_100a, sm_103a; cuda:0 is sm_120"):
        library.for_device(torch.device("cuda:0"))


@pytest.mark.parametrize(
    ("device", "strict", "capability", "reason"),
    [
        ("cpu", False, None, "runs on CUDA devices, not on cpu"),
        ("cuda", True, (10, 0), "strict alignment needs sums"),
        ("cuda", False, None, "torch sees no CUDA device"),
        ("cuda", False, (9, 0), r"needs FP4 tensor cores \(sm_100a, sm_103a\); this GPU is sm_90"),
        ("cuda", False, (10, 3), "kernels are not built; run scripts/build_kernels --arch sm_103a"),
    ],
)
def test_refusals(monkeypatch, tmp_path, device, strict, capability, reason):
    monkeypatch.setenv("MINITE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: capability)
    refusal = NativeBackend.refused(device, strict)
    assert refusal is not None and re.search(reason, refusal)


def test_prepared_weights_hold_the_references_bytes():
    w_ENK = normal(3, 48, 96, seed=20)
    q = nvfp4.quantize(w_ENK, (1, 16), "expert")
    weight = NativeWeight.of(q, emulation=None)
    assert torch.equal(weight.codes, q.codes) and torch.equal(weight.amax, q.amax) and not weight.dense
    for e in range(3):
        scales = layout.unswizzle(weight.tiles[e], 48, 6)
        assert torch.equal(scales, q.block_scale[e].view(torch.uint8))
    dense = NativeWeight.of(nvfp4.quantize(w_ENK[0], (1, 16), "tensor"), emulation=None)
    assert dense.dense and dense.codes.shape == (1, 48, 48) and dense.amax.shape == (1,)
    with pytest.raises(UserError, match="native: weight: K is 48; expected a multiple of 32"):
        NativeWeight.of(nvfp4.quantize(w_ENK[:, :, :48], (1, 16), "expert"), emulation=None)


def test_one_amax_for_all_experts_is_repeated():
    q = nvfp4.quantize(torch.randn(2, 16, 32, generator=seeded(21)).bfloat16(), (1, 16), "tensor")
    assert torch.equal(NativeWeight.of(q, emulation=None).amax, q.amax.repeat(2))


def test_status_codes_become_errors_with_words(monkeypatch):
    opened = library.Library.__new__(library.Library)
    opened.path = Path("libminite_sm_100a.so")
    with pytest.raises(RuntimeError, match="workspace is smaller.*status -2"):
        opened._check(-2)
    with pytest.raises(RuntimeError, match="CUDA error 700"):
        opened._check(700)
    opened._check(0)


def test_a_weight_scaled_by_row_is_refused():
    backend = NativeBackend.__new__(NativeBackend)
    with pytest.raises(FormatError, match="one outer scale per row"):
        backend.prepare(nvfp4.quantize(normal(16, 32), (1, 16), "row"))


def test_the_self_test_says_what_was_not_run_and_why(monkeypatch, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    text, healthy = selftest.self_test()
    assert healthy and text.splitlines()[1:] == [f"  {k}: not run, torch sees no CUDA device" for k in selftest.KERNELS]
    monkeypatch.setenv("MINITE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for capability, reason in (((8, 0), "no kernels for sm_80"), ((10, 0), "run scripts/build_kernels --arch sm_100a")):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None, c=capability: c)
        assert reason in selftest.self_test()[0]
