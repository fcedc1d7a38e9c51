"""QTensor: a tensor held as codes, block scales and an outer scale. Data only; the arithmetic is in the format modules.

Stored as the kernels and checkpoints want it:

    nvfp4   codes uint8 [.., K/2] (low nibble = even column), block_scale float8_e4m3fn [.., K/16], amax float32
    mxfp8   codes uint8 [.., K] (E4M3 bytes), block_scale float8_e8m0fnu [.., K/32], amax None
    fp8     codes uint8 [.., K] (E4M3 bytes), and either amax or block_scale float32 (see fp8.py)

``amax`` is what the outer scale comes from (outer scale = amax / outer_max), kept because amax / 2688 does not
round-trip. Its shape says what shares one outer scale: [] the tensor, [E] each expert of [E, N, K], [.., rows] each
row.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import import_module

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class QTensor:
    """A quantized tensor of logical ``shape`` [.., rows, K]. 16x16 blocks repeat their scale over the 16 rows."""

    format: str  # "nvfp4" | "mxfp8" | "fp8": name of the module in minite.formats that reads it
    codes: Tensor
    block_scale: Tensor | None  # None: the outer scale is the only one
    amax: Tensor | None
    shape: tuple[int, ...]
    block: tuple[int, int]  # (rows, columns) that share one block scale
    layout: str = "linear"  # of block_scale: "linear" | "swizzled" (see layout.py)
    outer_max: float = 2688.0  # what amax maps to: 2688 or, with four over six, 1536; 448 for fp8

    @property
    def device(self) -> torch.device:
        return self.codes.device

    @property
    def nbytes(self) -> int:
        """Bytes of storage, scales included."""
        return sum(t.nbytes for t in self.tensors().values())

    @property
    def outer(self) -> str:
        """What shares one outer scale: "none" | "tensor" | "expert" | "row"."""
        if self.amax is None:
            return "none"
        if self.amax.ndim == 0:
            return "tensor"
        return "row" if self.amax.ndim == len(self.shape) - 1 else "expert"

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by field name."""
        named = {"codes": self.codes, "block_scale": self.block_scale, "amax": self.amax}
        return {name: t for name, t in named.items() if t is not None}

    def to(self, device: torch.device | str) -> QTensor:
        """The same bytes on another device."""
        return replace(self, **{name: t.to(device) for name, t in self.tensors().items()})  # type: ignore[arg-type]

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values [*shape], in the order of arithmetic of the format's module."""
        out: Tensor = import_module(f"minite.formats.{self.format}").dequantize(self, dtype)
        return out

    def bytes_equal(self, other: QTensor) -> bool:
        """True if both hold the same bytes in the same layout. See first_difference for where they differ."""
        return self.first_difference(other) is None

    def first_difference(self, other: QTensor) -> str | None:
        """Where two QTensors first differ, as "field [coordinate]: bytes here != there"; None if nowhere."""
        for field in ("format", "shape", "block", "layout", "outer_max"):
            if getattr(self, field) != getattr(other, field):
                return f"{field}: {getattr(self, field)} != {getattr(other, field)}"
        mine, theirs = self.tensors(), other.tensors()
        if mine.keys() != theirs.keys():
            return f"fields: {list(mine)} != {list(theirs)}"
        for name, t in mine.items():
            difference = _first_byte_difference(t, theirs[name])
            if difference:
                return f"{name} {difference}"
        return None


def in_blocks(x: Tensor, size: int) -> Tensor:
    """x [.., K] as [.., K/size, size]; a view where x allows one. Zero rows are fine."""
    return x.reshape(*x.shape[:-1], x.shape[-1] // size, size)


def _first_byte_difference(a: Tensor, b: Tensor) -> str | None:
    if a.dtype != b.dtype or a.shape != b.shape:
        return f"{a.dtype} {list(a.shape)} != {b.dtype} {list(b.shape)}"
    bytes_a, bytes_b = (t.detach().cpu().contiguous().reshape(-1, 1).view(torch.uint8) for t in (a, b))
    differs = (bytes_a != bytes_b).any(dim=1)
    if not bool(differs.any()):
        return None
    i = int(differs.int().argmax())
    coordinate = [int(c) for c in torch.unravel_index(torch.tensor(i), a.shape)] if a.ndim else []
    return f"{coordinate}: {bytes_a[i].tolist()} != {bytes_b[i].tolist()} ({int(differs.sum())} of {a.numel()} differ)"
