"""`minite doctor --self-test` over operators on a CPU, with small shapes and made-up times."""

from __future__ import annotations

from types import SimpleNamespace

import ops_on_cpu
import pytest

from minite.backends.cutlass import expert_rows, norm, ops, selftest, selftest_rows, wgrad

_PLACES = {
    ops: ("quantize", "amax", "swizzle", "gemm"),
    expert_rows: ("permute", "combine"),
    norm: ("norm_quantize",),
    wgrad: ("swizzle_columns", "wgrad"),
}


@pytest.fixture(params=[90, 100])
def architecture(request, monkeypatch):
    for module, names in _PLACES.items():
        for name in names:
            monkeypatch.setattr(module, name, getattr(ops_on_cpu, name))
    if request.param < 100:
        monkeypatch.setattr(ops, "gemm", ops_on_cpu.twin)
        monkeypatch.setattr(wgrad, "wgrad", ops_on_cpu.twin_wgrad)
    monkeypatch.setattr(selftest_rows, "DEVICE", "cpu")
    monkeypatch.setattr(selftest.selftest_gemm, "DEVICE", "cpu")
    for name, value in {
        "_QUANTIZE": ((1, 16), (300, 80)),
        "_NORM": ((300, 80),),
        "_GEMM_MNK": ((1, 16, 64),),
        "_ROWS": ((3, 0, 40, 1, 0),),
        "_GROUPED_NK": ((136, 96),),
        "_GRADIENT_NK": ((96, 136),),
        "_LAYER": (64, 64),
        "_TOKENS": (13, 4, 3),
        "_refusal": lambda: None,
        "_library": lambda: SimpleNamespace(architecture=request.param),
        "medians": lambda runs, repeats: {"it": 1.0},
        "copy_bandwidth": lambda: 4.0,
    }.items():
        monkeypatch.setattr(selftest, name, value)
    return request.param


def verdicts(text: str) -> dict[str, list[str]]:
    """Kernel -> the verdict of each of its rows."""
    rows = [line for line in text.splitlines()[2:] if "not run" not in line]
    found: dict[str, list[str]] = {}
    for line in rows:
        found.setdefault(line[2:16].strip(), []).append(line.split("  ")[-1])
    return found


def test_every_kernel_is_there_and_what_is_right_passes(architecture):
    text, healthy = selftest.self_test()
    assert healthy and "FAILED" not in text
    counts = {kernel: len(rows) for kernel, rows in verdicts(text).items() if set(rows) == {"ok"}}
    assert counts == {
        "quantize": 5, "norm + codes": 2, "permute": 1, "combine": 1, "swizzle": 1,
        "gemm dense": 1, "gemm grouped": 1, "gemm dgrad": 1, "gemm wgrad": 1,
    }  # fmt: skip
    assert set(counts) == set(selftest.KERNELS)


def test_what_this_chip_cannot_run_is_said_by_kernel(architecture):
    lines = [line for line in selftest.self_test()[0].splitlines() if "not run" in line]
    if architecture >= 100:
        assert lines == ["  BF16 twin of the products: not run, it is for sm_90; this GPU is sm_100"]
        return
    assert [line.split(" on FP4 tensor cores: not run, this GPU is sm_90, ")[0] for line in lines] == [
        f"  {name}" for name in selftest.PRODUCTS
    ]


def nudged(right):
    """Two per cent off: more than a BF16 result rounds by."""
    return lambda *operands: right(*operands) * 1.02


def one_code_off(right):
    def run(*operands):
        *before, codes, scales, amax = right(*operands)
        codes[-1, -1] ^= 1
        return *before, codes, scales, amax

    return run


@pytest.mark.parametrize(
    ("module", "name", "spoil", "kernels"),
    [
        (ops, "gemm", nudged, ["gemm dense", "gemm dgrad", "gemm grouped"]),
        (wgrad, "wgrad", nudged, ["gemm wgrad"]),
        (wgrad, "swizzle_columns", lambda right: lambda *a: right(*a).roll(1), ["swizzle"]),
        (norm, "norm_quantize", one_code_off, ["norm + codes"]),
        (wgrad, "wgrad", lambda right: lambda *a: right(*a) + 1e-30, ["gemm wgrad"]),  # no zeros without rows
    ],
)
def test_what_is_wrong_is_named(monkeypatch, architecture, module, name, spoil, kernels):
    monkeypatch.setattr(module, name, spoil(getattr(module, name)))
    text, healthy = selftest.self_test()
    failed = [kernel for kernel, rows in verdicts(text).items() if any("ok" not in row for row in rows)]
    if name == "swizzle_columns" and architecture >= 100:
        kernels = [*kernels, "gemm wgrad"]  # which reads those tiles
    assert not healthy and sorted(failed) == sorted(kernels)


def test_dgrad_and_wgrad_run_on_sizes_that_fill_no_tile():
    """The real table: ragged rows, experts without any, sums and results that leave a tile part empty."""
    for n, k in selftest._GRADIENT_NK:
        assert n % 32 == 0 and k % 8 == 0 and n % 256 and k % 128
    assert any(0 in rows for rows in selftest._ROWS) and any(rows % 64 for rows_E in selftest._ROWS for rows in rows_E)
