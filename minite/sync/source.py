"""The linears of a checkpoint by anyone: found under split, fused or expert-stacked names, in any known scheme."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from minite.errors import UserError
from minite.formats import QTensor, conventions
from minite.sync.checkpoint import Checkpoint
from minite.sync.modelopt import outer_scale
from minite.sync.names import AMAX, FP8, FUSED, MEMBER_OF, SCHEMES, UNUSED, Scheme, scheme_of, split_name, tensor_name
from minite.sync.tensor_file import PLAIN, Slot

AMAX_FILE = "minite_amax.safetensors"  # exact amaxes, outside the index, where other loaders do not look
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Place:
    """Where a linear lies: the module that holds it and the part of it that is this linear."""

    container: str
    rows: int  # of the container (of one expert of it)
    first: int = 0  # row of it where the linear starts
    expert: int | None = None  # index on a leading expert axis
    member: int = 0  # of a fused module
    members: int = 1


@dataclass(frozen=True)
class Held:
    """One quantized linear as stored. ``q`` has the amax that was recorded, or the one its outer scale came from."""

    scheme: Scheme
    q: QTensor
    outer: Tensor | None = None  # float32 [], as stored; None for FP8
    recorded: bool = True  # the amax is the one that miniTE wrote down

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Values [N, K] as the library that wrote them reads them; as miniTE does where the amax is recorded."""
        if self.outer is None or self.recorded:
            return self.q.dequantize(dtype)
        assert self.q.block_scale is not None and self.scheme.convention is not None
        return conventions.dequantize(self.q.codes, self.q.block_scale, self.outer, self.scheme.convention).to(dtype)


class Source:
    """A checkpoint of a known model.

    Args:
        shapes: ``ModelFamily.hf_tensors(model)``: the parameters that are asked for, and their shapes.
    """

    def __init__(self, reader: Checkpoint, shapes: Shapes) -> None:
        self.reader, self.shapes = reader, shapes
        self._experts = len({name.split(".experts.")[1].split(".")[0] for name in shapes if ".experts." in name})
        if (reader.directory / AMAX_FILE).exists():
            reader.add_file(AMAX_FILE)
        self.names = reader.names

    def scheme(self, module: str) -> Scheme | None:
        """How a linear is stored; None: not quantized. UserError when it lies nowhere, or in two places."""
        return scheme_of(self._place(module).container, self.names)

    def read(self, name: str) -> Tensor | Held:
        """The tensor of a parameter, or what is stored for a quantized linear. UserError for an unfit one."""
        shape, module = self.shapes[name], name.removesuffix(".weight")
        if len(shape) == 2:
            place = self._place(module)
            scheme = scheme_of(place.container, self.names)
            if scheme is not None:
                return self._fp8(module, place, *shape) if scheme is FP8 else self._nvfp4(module, place, scheme, *shape)
            return self._rows(place, "weight", shape, PLAIN)
        self._check(name, self.reader.slot(name), shape, PLAIN)
        return self.reader.read(name)

    def input_scale(self, module: str) -> float | None:
        """What is stored as the input scale of a quantized linear, in its scheme's own meaning."""
        place = self._place(module)
        scheme = scheme_of(place.container, self.names)
        assert scheme is not None and scheme.input is not None
        given = self._number(place, scheme, scheme.input)
        return None if given is None else float(given)

    def unknown(self) -> list[str]:
        """Tensors that are no part of the model, sorted."""
        modules = [name.removesuffix(".weight") for name, shape in self.shapes.items() if len(shape) == 2]
        containers = {place.container for module in modules for place in self._places(module)}
        return sorted(name for name in self.names if name not in self.shapes and not _part_of(name, containers))

    def _place(self, module: str) -> Place:
        codes = {scheme.codes for scheme in SCHEMES}
        found = [
            place
            for place in self._places(module)
            if any(tensor_name(place.container, part, self.names) for part in codes)
        ]
        if len(found) != 1:
            what = f"stored twice, as {found[0].container} and {found[1].container}" if found else "not there"
            raise self._error(f"{module} is {what}; is it the model of the recipe?")
        return found[0]

    def _places(self, module: str) -> list[Place]:
        """All places where the linear could be."""
        parent, _, leaf = module.rpartition(".")
        stack, _, expert = parent.rpartition(".")
        stacked = expert.isdigit() and stack.endswith(".experts")
        rows = self.shapes[f"{module}.weight"][0]
        places = [Place(module, rows)]
        if stacked:
            places.append(Place(f"{stack}.{leaf}", rows, expert=int(expert)))
        if leaf in MEMBER_OF:
            fused = MEMBER_OF[leaf]
            all_rows = [self.shapes[f"{parent}.{member}.weight"][0] for member in FUSED[fused]]
            at = FUSED[fused].index(leaf)
            for container, index in ((parent, None), (stack, int(expert))) if stacked else ((parent, None),):
                first = sum(all_rows[:at])
                places.append(Place(f"{container}.{fused}", sum(all_rows), first, index, at, len(all_rows)))
        return places

    def _nvfp4(self, module: str, place: Place, scheme: Scheme, n: int, k: int) -> Held:
        assert scheme.outer is not None and scheme.convention is not None
        if k % 16:
            raise self._error(f"{module} has K = {k}, which is no multiple of 16; NVFP4 cannot hold it")
        codes = self._rows(place, scheme.codes, (n, k // 2), ("U8",))
        scale = self._rows(place, scheme.block, (n, k // 16), ("F8_E4M3",))
        if bool((scale.view(torch.uint8) & 0x7F == 0x7F).any()):
            raise self._error(
                f"{module}.{scheme.block} holds NaN; whatever it was is lost, export the checkpoint again"
            )
        outer = self._number(place, scheme, scheme.outer)
        if outer is None or not 0 < float(outer) < torch.inf:
            got = "missing" if outer is None else f"{float(outer)}"
            raise self._error(f"{module}.{scheme.outer} is {got}; expected a positive number, export it again")
        recorded = self._number(Place(module, n), scheme, AMAX)
        if recorded is not None and not torch.equal(outer_scale(recorded), outer):
            raise self._error(
                f"{module}: its {scheme.outer} {float(outer)} is not that of its amax {float(recorded)}; "
                f"remove {AMAX_FILE} if another program changed the scales"
            )
        amax = conventions.amax_of(outer, scheme.convention) if recorded is None else recorded
        return Held(scheme, QTensor("nvfp4", codes, scale, amax, (n, k), (1, 16)), outer, recorded is not None)

    def _fp8(self, module: str, place: Place, n: int, k: int) -> Held:
        if place.first % 128:
            raise self._error(f"{module} starts at row {place.first} of {place.container}, inside a 128x128 block")
        codes = self._rows(place, FP8.codes, (n, k), ("F8_E4M3",))
        scale = self._rows(place, FP8.block, (-(-n // 128), -(-k // 128)), ("F32", "BF16"), block=128).float()
        if not bool(((scale > 0) & torch.isfinite(scale)).all()):
            raise self._error(
                f"{module}.{FP8.block} holds NaN, Inf or a scale not above 0; export the checkpoint again"
            )
        return Held(FP8, QTensor("fp8", codes.view(torch.uint8), scale, None, (n, k), (128, 128), outer_max=448.0))

    def _rows(self, place: Place, part: str, shape: tuple[int, ...], dtypes: tuple[str, ...], block: int = 1) -> Tensor:
        """The linear's rows, [*shape], of a tensor [rows, ..] or [E, rows, ..], which is checked before it is read.
        ``block``: rows of the linear in one of them."""
        name, experts = self._name(place, part), () if place.expert is None else (self._experts,)
        self._check(name, self.reader.slot(name), (*experts, -(-place.rows // block), *shape[1:]), dtypes)
        first, count = place.first // block, shape[0]
        if place.expert is None:
            return self.reader.read(name, first, count)
        return self.reader.read(name, place.expert, 1)[0, first : first + count]

    def _number(self, place: Place, scheme: Scheme, part: str) -> Tensor | None:
        """The linear's own of one number per matrix, per expert or per member: float32 []; None without any."""
        name = tensor_name(place.container, part, self.names)
        if name is None:
            return None
        slot = self.reader.slot(name)
        experts = 1 if place.expert is None else self._experts
        expert, values = place.expert or 0, slot.nbytes // 4
        at = {1: 0, experts: expert, place.members: place.member} | {
            experts * place.members: expert * place.members + place.member
        }
        if slot.dtype != "F32" or values not in at:
            raise self._error(f"{name} is {slot.dtype} {list(slot.shape)}; expected F32, one number per matrix")
        return self.reader.read(name).reshape(-1)[0 if values == 1 else at[values]].clone()

    def _name(self, place: Place, part: str) -> str:
        name = tensor_name(place.container, part, self.names)
        if name is None:
            raise self._error(f"{place.container}.{part} is missing; copy or export the checkpoint again")
        return name

    def _check(self, name: str, slot: Slot, shape: tuple[int, ...], dtypes: tuple[str, ...]) -> None:
        """FP8 that no scale was found for is refused with the integers: its values would be off by the scale."""
        if slot.dtype not in dtypes:
            or_else = " or a known quantization with all its parts" if dtypes is PLAIN else ""
            raise self._error(f"{name} is {slot.dtype}; expected {', '.join(dtypes)}{or_else}")
        if slot.shape != shape:
            raise self._error(f"{name} is {list(slot.shape)}; the recipe's model has {list(shape)}, without padding")

    def _error(self, text: str) -> UserError:
        return UserError(f"{self.reader.directory}: {text}")


def _part_of(name: str, containers: set[str]) -> bool:
    """Whether a tensor is a part of one of the modules, or may be passed by. A bias is none: no model here has any."""
    module, part = split_name(name)
    return (module in containers and part != "bias") or name.endswith(UNUSED)
