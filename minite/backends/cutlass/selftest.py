"""Every kernel of the native backend against the reference, and its speed: `minite doctor --self-test`.

On sm_90 the products are the BF16 twin; which of the kernels ran, and which did not and why, is in the table.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from minite.backends.cutlass import selftest_gemm, selftest_rows
from minite.backends.cutlass.library import Library, architecture_of, load
from minite.backends.cutlass.selftest_rows import Case
from minite.backends.triton.timing import copy_bandwidth, medians
from minite.errors import UserError

PRODUCTS = ("gemm dense", "gemm grouped", "gemm dgrad", "gemm wgrad")
KERNELS = ("quantize", "norm + codes", "permute", "combine", "swizzle", *PRODUCTS)
# rows, K: a single block, one row, no whole tile of 4 scales, what a layer has, rows beyond what a warp keeps
_QUANTIZE = ((1, 16), (1, 2048), (300, 80), (131072, 2048), (131072, 768), (64, 8192), (2**20, 768))
_NORM = ((1, 16), (300, 80), (64, 2048), (131072, 2048), (64, 8192))
_LAYER = (131072, 768)  # rows of experts and their width; as a weight: 128 experts of 1024 x 768
_TOKENS = (16384, 128, 8)  # tokens of a layer, experts, choices of a token
_GEMM_MNK = ((1, 1536, 2048), (300, 520, 2080), (4096, 4096, 4096))
_ROWS = ((3, 0, 40, 1, 0), (0, 0, 0, 0, 7), (300, 0, 129, 128, 1), (4096, 0, 4096, 4096, 4096))
_GROUPED_NK = ((136, 96), (1536, 2048))
_GRADIENT_NK = ((96, 136), (1504, 2056))  # dgrad sums over N, a multiple of 32; neither fills its last tile
_HIDDEN = 2048


def self_test() -> tuple[str, bool]:
    """(the table, whether nothing that ran was wrong)."""
    refusal = _refusal()
    if refusal is not None:
        return "\n".join(["native kernels", *(f"  {name}: not run, {refusal}" for name in KERNELS)]), True
    architecture = _library().architecture
    lines = [f"native kernels, sm_{architecture}" + (", GEMMs as BF16 twin" if architecture < 100 else "")]
    copied = copy_bandwidth()
    lines.append(
        f"  {'kernel':14} {'problem':34} {'ms':>9} {'TB/s':>6} {'of copy':>8}  verdict; copy {copied:.2f} TB/s"
    )
    healthy = True
    for case in _cases(architecture):
        fault = case.check()
        healthy = healthy and fault is None
        ms = medians({"it": case.run}, repeats=5)["it"]
        speed = case.bytes / ms / 1e9
        verdict = "ok" if fault is None else f"FAILED, {fault}"
        rates = f"{ms:9.4f} {speed:6.2f} {speed / copied:8.0%} {case.flops / ms / 1e9:8.0f}"
        lines.append(f"  {case.kernel:14} {case.what:34} {rates}  {verdict}")
        torch.cuda.empty_cache()
    return "\n".join(lines + _not_run(architecture)), healthy


def _not_run(architecture: int) -> list[str]:
    """What the table above leaves out on this chip, by kernel."""
    if architecture >= 100:
        return [f"  BF16 twin of the products: not run, it is for sm_90; this GPU is sm_{architecture}"]
    why = (
        f"this GPU is sm_{architecture}, which has no FP4 tensor cores; the BF16 twin above shares all but the product"
    )
    return [f"  {name} on FP4 tensor cores: not run, {why}" for name in PRODUCTS]


def _refusal() -> str | None:
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        _library()
    except UserError as error:
        return str(error)
    return None


def _library() -> Library:
    capability = torch.cuda.get_device_capability()
    architecture = architecture_of(capability)
    if architecture is None:
        raise UserError("no kernels for sm_{}{}".format(*capability))
    return load(architecture.name)


def _cases(architecture: int) -> Iterator[Case]:
    for rows, k in _QUANTIZE:
        yield selftest_rows.quantize_case(rows, k)
    yield selftest_rows.swiglu_case(*_LAYER)
    for block_rows in (1, 16):
        yield selftest_rows.weight_case(block_rows, *_LAYER)
    for rows, k in _NORM:
        for summed in (False, True):
            yield selftest_rows.norm_case(rows, k, summed=summed)
    yield selftest_rows.permute_case(*_TOKENS, _HIDDEN)
    yield selftest_rows.combine_case(*_TOKENS, _HIDDEN)
    yield selftest_rows.swizzle_columns_case((64, 192, 64, 128), 136)
    for m, n, k in _GEMM_MNK:
        yield selftest_gemm.gemm_case(architecture, (m,), n, k, grouped=False)
    for rows_E in _ROWS:
        for n, k in _GROUPED_NK:
            yield selftest_gemm.gemm_case(architecture, rows_E, n, k, grouped=True)
    for rows_E in _ROWS:
        for n, k in _GRADIENT_NK:
            yield selftest_gemm.dgrad_case(architecture, rows_E, n, k)
            yield selftest_gemm.wgrad_case(architecture, rows_E, n, k)
