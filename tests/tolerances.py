"""Every numeric bound of the tests, with its reason. A test names its class; it never loosens a bound on the spot.

BITWISE    equal bytes: codes, scales, amax against golden files or the scalar reference; export; resume; strict rows.
SUM-ORDER  GEMMs on the same operands: derived from K and the output type (gemm_bound).
QUANT      quantized against BF16: bands with both ends measured (QUANT_ERROR).
STATS      stochastic rounding: SIGMAS standard deviations of the mean, with fixed seeds.
"""

from __future__ import annotations

import torch
from torch import Tensor

SIGMAS = 4  # one false alarm in 16,000 over all choices of the seed; none with the fixed ones

# Relative Frobenius error of one quantized standard-normal matrix, 256 x 512. Measured over 50 seeds, min to max, then
# widened by 1 % at both ends: an error below the band means that quantization did not happen.
QUANT_ERROR = {
    "nvfp4_1d": (0.0937, 0.0968),
    "nvfp4_2d": (0.1096, 0.1130),
    "nvfp4_row": (0.0937, 0.0966),
    "nvfp4_tensor": (0.0937, 0.0968),
    "mxfp8": (0.0262, 0.0271),
    "nvfp4_1d_4o6": (0.0858, 0.0884),
    "nvfp4_row_4o6": (0.0873, 0.0899),
    "fp8_tensor": (0.0260, 0.0268),
    "fp8_row": (0.0259, 0.0267),
    "fp8_128x128": (0.0260, 0.0269),
    "fp8_1x128": (0.0253, 0.0261),
}


def assert_same_bytes(actual: Tensor, expected: Tensor, what: str = "") -> None:
    """BITWISE: same dtype, shape and bytes; says where the first difference is."""
    assert actual.dtype == expected.dtype, f"{what}: dtype {actual.dtype} != {expected.dtype}"
    assert actual.shape == expected.shape, f"{what}: shape {list(actual.shape)} != {list(expected.shape)}"
    a, b = (t.detach().cpu().contiguous().reshape(-1, 1).view(torch.uint8) for t in (actual, expected))
    wrong = (a != b).any(dim=1).nonzero().flatten()
    if len(wrong):
        at = [int(i) for i in torch.unravel_index(wrong[0], actual.shape)] if actual.ndim else []
        values = f"{actual[tuple(at)]} != {expected[tuple(at)]}"
        raise AssertionError(f"{what}: {len(wrong)} of {len(a)} differ, first at {at}: {values}")


def gemm_bound(abs_product: Tensor, exact: Tensor, k: int, out_dtype: torch.dtype) -> Tensor:
    """SUM-ORDER: largest error of a float32-accumulated product, for any order of its sum. float64, like exact.

    abs_product = sum_k |a_k b_k|, outer scales included; exact = the float64 result. Exact products and K - 1 float32
    additions give at most gamma_K * abs_product (Higham, Accuracy and Stability, 3.1); three more float32 roundings
    come from the outer scales, and half a unit in the last place from the cast.
    """
    u = 2.0**-24
    gamma = (k + 3) * u / (1 - (k + 3) * u)
    cast = torch.finfo(out_dtype).eps / 2
    return gamma * abs_product + cast * (exact.abs() + gamma * abs_product)


# Strict alignment: every GEMM and every row-wise operation rounds the same FP64 value on both sides; what remains is
# the FP64 log-softmax over differently batched logits. The project's promise. [nats]
STRICT_GAP = 1e-8

# SGLang's CPU engine against the built-in sampler or the learner, FP32 storage: FP32 sums in another order through two
# layers; measured 1.3e-6. A wrong scale, rounding or expert shows from 1e-2 on. [nats]
FP32_ENGINE_GAP = 2e-5
