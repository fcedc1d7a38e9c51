"""The modules of a checkpoint of any model, told by the names, dtypes and shapes of their tensors alone."""

from __future__ import annotations

from dataclasses import dataclass, field

from minite.sync.checkpoint import Checkpoint
from minite.sync.names import COMPRESSED_TENSORS, FP8, MODELOPT, NOT_LINEAR, Scheme, split_name
from minite.sync.tensor_file import Slot

NVFP4 = {MODELOPT: "NVFP4 ModelOpt", COMPRESSED_TENSORS: "NVFP4 compressed-tensors"}
FP8_BLOCK, FP8_TENSOR = "FP8 128x128", "FP8 per tensor"
_PLAIN = {"BF16": "BF16", "F16": "FP16", "F32": "FP32"}


@dataclass
class Module:
    """One module, perhaps fused, perhaps with a leading expert axis."""

    name: str
    parts: dict[str, str] = field(default_factory=dict)  # part -> tensor
    slots: dict[str, Slot] = field(default_factory=dict)  # part -> dtype, shape
    scheme: Scheme | None = None  # of a quantized one
    format: str = ""

    @property
    def quantized(self) -> bool:
        return self.scheme is not None

    @property
    def codes(self) -> Slot | None:
        return self.slots.get(self.scheme.codes if self.scheme else "weight")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix it stands for: [N, K] or [E, N, K]."""
        if self.codes is None:
            return ()
        packed = self.format.startswith("NVFP4") and self.codes.shape
        return (*self.codes.shape[:-1], self.codes.shape[-1] * 2) if packed else self.codes.shape

    @property
    def linear(self) -> bool:
        """Whether a quantizer would take it for a linear: embeddings and norms are none."""
        return len(self.shape) >= 2 and not self.name.endswith(NOT_LINEAR)

    @property
    def nbytes(self) -> int:
        return sum(slot.nbytes for slot in self.slots.values())


def modules_of(reader: Checkpoint) -> dict[str, Module]:
    """Module name -> module, in the order of their numbers."""
    found: dict[str, Module] = {}
    for name in sorted(reader.names, key=_by_number):
        module, part = split_name(name)
        entry = found.setdefault(module, Module(module))
        entry.parts[part], entry.slots[part] = name, reader.slot(name)
    for entry in found.values():
        entry.scheme, entry.format = _format(entry)
    return found


def _format(module: Module) -> tuple[Scheme | None, str]:
    slots = module.slots
    dtype = slots["weight"].dtype if "weight" in slots else ""
    if COMPRESSED_TENSORS.codes in slots:
        return COMPRESSED_TENSORS, NVFP4[COMPRESSED_TENSORS]
    if FP8.block in slots:
        return FP8, FP8_BLOCK
    if dtype == "F8_E4M3" and MODELOPT.block in slots:
        return None, FP8_TENSOR
    if MODELOPT.block in slots or MODELOPT.outer in slots or dtype == "U8":
        return MODELOPT, NVFP4[MODELOPT]
    return None, _PLAIN.get(dtype, dtype or "no weight")


def _by_number(name: str) -> list[tuple[int, int, str]]:
    """Layer 10 after layer 9."""
    return [(0, int(s), "") if s.isdigit() and len(s) < 10 else (1, 0, s) for s in name.split(".")]
