"""The table of operand formats: everything the plan needs to know of a format without importing torch.

A new format is one row here and one module that ``module`` names.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class OperandFormat:
    """One way to hold a GEMM operand."""

    name: str
    module: str | None  # home of quantize / dequantize; None = the operand stays as it is
    bits: float  # storage per element, block scales included
    k_multiple: int  # the contraction size must divide by this
    rows_multiple: int  # and the row count by this
    roles: frozenset[str]  # of "weight", "input"
    about: str


_NVFP4, _MXFP8, _FP8 = "minite.formats.nvfp4", "minite.formats.mxfp8", "minite.formats.fp8"
_WEIGHT, _INPUT = frozenset({"weight"}), frozenset({"input"})
_GROUP_SCALE = "one outer scale per fusion group (per expert)"

OPERANDS: dict[str, OperandFormat] = {
    f.name: f
    for f in (
        OperandFormat("bf16", None, 16, 1, 1, _WEIGHT | _INPUT, "not quantized"),
        OperandFormat("nvfp4_1d", _NVFP4, 4.5, 16, 1, _WEIGHT, f"E2M1, 1x16 blocks, {_GROUP_SCALE}"),
        OperandFormat("nvfp4_2d", _NVFP4, 4.5, 16, 16, _WEIGHT, f"E2M1, 16x16 blocks, {_GROUP_SCALE}"),
        OperandFormat("nvfp4_row", _NVFP4, 4.5, 16, 1, _INPUT, "E2M1, 1x16 blocks, one outer scale per token"),
        OperandFormat("nvfp4_tensor", _NVFP4, 4.5, 16, 1, _INPUT, "E2M1, 1x16 blocks, one outer scale for all tokens"),
        OperandFormat("nvfp4_1d_4o6", _NVFP4, 4.5, 16, 1, _WEIGHT, "nvfp4_1d with four over six (MSE)"),
        OperandFormat("nvfp4_row_4o6", _NVFP4, 4.5, 16, 1, _INPUT, "nvfp4_row with four over six (MSE)"),
        OperandFormat("mxfp8", _MXFP8, 8.25, 32, 1, _WEIGHT | _INPUT, "E4M3, 1x32 blocks with E8M0 scales"),
        OperandFormat("fp8_tensor", _FP8, 8, 1, 1, _WEIGHT, f"E4M3, {_GROUP_SCALE}"),
        OperandFormat("fp8_row", _FP8, 8, 1, 1, _INPUT, "E4M3, one scale per token"),
        OperandFormat("fp8_128x128", _FP8, 8 + 32 / 128**2, 128, 128, _WEIGHT, "E4M3, one scale per 128x128 tile"),
        OperandFormat("fp8_1x128", _FP8, 8.25, 128, 1, _INPUT, "E4M3, one scale per 128 values of a token"),
    )
}

# Operands of dgrad and wgrad: a BF16 gradient with the original weight (input) or with what the forward used; or all of
# it quantized to NVFP4 along what is summed over (layers/nvfp4_gradients.py).
GRADIENT_CHOICES = ("bf16", "dequantized", "nvfp4")
NVFP4_SUM = 16  # what dgrad sums over, N, is a multiple of this
# The same for FP4 tensor cores (backends/cutlass/checks.py): what a product sums over, and the width of its result.
NATIVE_SUM, NATIVE_ROW = 32, 8


def is_nvfp4(operand: str) -> bool:
    """Whether an operand of the table is held in NVFP4."""
    return OPERANDS[operand].module == _NVFP4
