"""The backend "cpu": the reference with its NVFP4 quantizer and reader compiled. The same numbers, strict ones too.

Imports numba only when it is constructed, so that `minite doctor` can ask for the reason of a refusal anywhere.
"""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from minite.backends.base import Operand
from minite.backends.reference import ReferenceBackend
from minite.formats import QTensor
from minite.formats.nvfp4 import PLAIN_OPERANDS, operand_blocks


class CpuBackend(ReferenceBackend):
    """Implements backends.base.Backend. What is not in PLAIN_OPERANDS, and every GEMM, is the reference's own code."""

    name = "cpu"
    kind = "emulated"

    def __init__(self, *, strict: bool) -> None:
        super().__init__(strict=strict)
        from minite.backends.cpu import dequantize, quantize

        self._writer, self._reader = quantize, dequantize

    @staticmethod
    def refused(device: str, strict: bool) -> str | None:
        """Why this backend cannot run there; None: it can."""
        if device != "cpu":
            return f"runs on a CPU, not on {device}"
        return None if find_spec("numba") else "needs numba; install it with: pip install numba"

    def quantize(
        self, x_MK: Tensor, how: str, *, amax: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Operand:
        """formats.quantize_operand, byte for byte; raises FormatError and NonFiniteError in the same words."""
        if how not in PLAIN_OPERANDS or (amax is not None and not bool(torch.isfinite(amax).all())):
            return super().quantize(x_MK, how, amax=amax, generator=generator)
        return self._writer.quantize(x_MK, *operand_blocks(x_MK, how), amax)

    def dequantize(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        """QTensor.dequantize, byte for byte but for which NaN a NaN is."""
        return self._reader.dequantize(q, dtype) if q.format == "nvfp4" else super().dequantize(q, dtype)

    def _block_scaled(self, q: QTensor, dtype: torch.dtype) -> Tensor:
        return self._reader.block_scaled(q, dtype) if q.format == "nvfp4" else super()._block_scaled(q, dtype)
