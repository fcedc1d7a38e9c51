"""A weight as the native GEMM reads it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from minite.backends.cutlass.checks import check_padding, check_sizes
from minite.backends.triton.backend import TritonBackend
from minite.formats import QTensor, layout


@dataclass(frozen=True)
class NativeWeight:
    """Codes uint8 [E, N, K/2], swizzled scales uint8 [E, bytes], amax float32 [E]; E = 1 for a dense weight."""

    source: QTensor  # [N, K] or [E, N, K]
    codes: Tensor
    tiles: Tensor
    amax: Tensor
    emulation: TritonBackend

    @classmethod
    def of(cls, w: QTensor, emulation: TritonBackend) -> NativeWeight:
        """UserError for sizes that the GEMM does not take. Swizzles once per weight version."""
        *_, n, k = w.shape
        check_sizes("native: weight", 0, n, k)
        assert w.block_scale is not None and w.amax is not None and w.layout == "linear"
        codes = w.codes.reshape(-1, n, k // 2)
        experts = codes.shape[0]
        tiles = layout.swizzle(w.block_scale.view(torch.uint8).reshape(experts, n, k // 16))
        check_padding("native: weight", tiles, n, k)
        return cls(w, codes.contiguous(), tiles, w.amax.reshape(-1).expand(experts).contiguous(), emulation)

    @property
    def dense(self) -> bool:
        return len(self.source.shape) == 2

    @cached_property
    def emulated(self) -> object:
        """What the emulation reads, for inputs that FP4 tensor cores do not multiply (BF16, FP8); made at first use."""
        return self.emulation.prepare(self.source)
