"""What the quantizers of an engine were given and made of it, call by call: to compare two engines by layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from minite.backends.base import Backend, Operand
from minite.formats.qtensor import QTensor

Call = dict[str, Any]  # how: str, x: Tensor, and for a quantized result its parts: codes, block_scale, amax


class Recording:
    """A backend that notes every quantizer call and leaves the rest to ``inner``. Calls made in CUDA graphs pass by."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.fused = None  # step by step, so that every quantizer call passes here
        self.calls: list[Call] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def quantize(self, x_MK: Tensor, how: str, **arguments: Any) -> Operand:
        out = self.inner.quantize(x_MK, how, **arguments)
        parts = {name: part.cpu() for name, part in out.tensors().items()} if isinstance(out, QTensor) else {}
        self.calls.append({"how": how, "x": x_MK.cpu(), **parts})
        return out

    def quantize_input(self, x_MK: Tensor, how: str, **arguments: Any) -> Operand:
        """As codes, which any GEMM of the backend takes as well."""
        return self.quantize(x_MK, how, **arguments)

    def save(self, path: str | Path) -> None:
        torch.save(self.calls, path)
