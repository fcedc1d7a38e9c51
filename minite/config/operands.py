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


def _row(name: str, module: str | None, bits: float, k: int, rows: int, roles: str, about: str) -> OperandFormat:
    return OperandFormat(name, module, bits, k, rows, frozenset(roles.split()), about)


OPERANDS: dict[str, OperandFormat] = {
    f.name: f
    for f in (
        _row("bf16", None, 16, 1, 1, "weight input", "not quantized"),
        _row("nvfp4_1d", "minite.formats.nvfp4", 4.5, 16, 1, "weight", "E2M1, 1x16 blocks, one outer scale per fusion group (per expert)"),
        _row("nvfp4_2d", "minite.formats.nvfp4", 4.5, 16, 16, "weight", "E2M1, 16x16 blocks, one outer scale per fusion group (per expert)"),
        _row("nvfp4_row", "minite.formats.nvfp4", 4.5, 16, 1, "input", "E2M1, 1x16 blocks, one outer scale per token"),
        _row("nvfp4_tensor", "minite.formats.nvfp4", 4.5, 16, 1, "input", "E2M1, 1x16 blocks, one outer scale for all tokens together"),
        _row("mxfp8", "minite.formats.mxfp8", 8.25, 32, 1, "weight input", "E4M3, 1x32 blocks with E8M0 scales"),
    )
}

GRADIENT_CHOICES = ("bf16", "dequantized")  # operand of dgrad (weight) and wgrad (input): original, or as the forward saw it
