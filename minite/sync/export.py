"""Full HF-named learner tensors -> the tensors a sampler is sent, one module group at a time.

The codes are made here, once, by the learner's own quantizer over the whole fusion group, and travel verbatim: nobody
quantizes again from a rounded scale.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

from minite.config.plan import PlanEntry, PrecisionPlan
from minite.formats import QTensor, operand_amax, quantize_operand
from minite.sync.errors import SyncError
from minite.sync.stored import to_parts
from minite.sync.verify import Digest

Shapes = Mapping[str, tuple[int, ...]]


class Quantizer(Protocol):
    """The part of backends.base.Backend that export needs."""

    def quantize(self, x_MK: Tensor, how: str, *, amax: Tensor | None = None) -> Tensor | QTensor: ...


class FormatQuantizer:
    """Quantizes by the definition, which every backend equals byte for byte; for those who have no backend at hand."""

    def quantize(self, x_MK: Tensor, how: str, *, amax: Tensor | None = None) -> Tensor | QTensor:
        return quantize_operand(x_MK, how, amax=amax)


class Packer:
    """Quantizes by the plan, tensor by tensor in any order. Only groups that still miss a member are held, so with
    tensors in model order the memory is that of one group.

    Args:
        shapes: ``ModelFamily.hf_tensors(model)``, to check every name and shape; None checks quantized linears only.

    Raises:
        SyncError: naming the tensor that is unexpected, duplicate, of a wrong shape, not finite, or missing at the end.
    """

    def __init__(self, plan: PrecisionPlan, backend: Quantizer, *, shapes: Shapes | None = None) -> None:
        self.plan, self.backend, self.shapes = plan, backend, shapes
        self._seen: set[str] = set()
        self._open: dict[str, dict[str, Tensor]] = {}  # fusion groups that miss a member

    def add(self, name: str, tensor: Tensor) -> dict[str, Tensor]:
        """A full tensor in the model's dtype by HF name -> what can now be sent: its whole group, or nothing yet."""
        if name in self._seen:
            raise SyncError(f"{name}: exported twice; each tensor must come once")
        check_tensor(name, tensor, self.plan, self.shapes)
        self._seen.add(name)
        entry = self.plan.get(name.removesuffix(".weight"))
        if entry is None or entry.weight == "bf16":
            return {name: tensor}
        group = entry.group or entry.name
        members = self.plan.group_members(entry.group) if entry.group else (entry,)
        held = self._open.setdefault(group, {})
        held[entry.name] = tensor
        return quantize_group(members, self._open.pop(group), self.backend) if len(held) == len(members) else {}

    def check_complete(self) -> None:
        """SyncError when a tensor never came."""
        expected = self.shapes or [f"{e.name}.weight" for e in self.plan if e.weight != "bf16"]
        missing = [name for name in expected if name not in self._seen]
        if missing:
            raise SyncError(f"{missing[0]}: missing from the exported weights ({len(missing)} missing in all)")


def pack(
    plan: PrecisionPlan,
    named_tensors: Iterable[tuple[str, Tensor]],
    backend: Quantizer,
    *,
    shapes: Shapes | None = None,
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Quantize by the plan, streaming. Yields (module that completed it, {name: tensor}); see stored.py for the names.

    Args and errors are those of Packer.
    """
    packer = Packer(plan, backend, shapes=shapes)
    for name, tensor in named_tensors:
        sent = packer.add(name, tensor)
        if sent:
            yield name.removesuffix(".weight"), sent
    packer.check_complete()


def unquantized(
    plan: PrecisionPlan,
    named_tensors: Iterable[tuple[str, Tensor]],
    backend: Quantizer,
    *,
    shapes: Shapes | None = None,
) -> tuple[Iterator[tuple[str, dict[str, Tensor]]], Digest]:
    """For samplers that quantize themselves: the tensors as they are, and the digest of what they must become, which is
    whole when the tensors have been gone through. Args and errors are those of Packer."""
    packer, digest = Packer(plan, backend, shapes=shapes), Digest()

    def groups() -> Iterator[tuple[str, dict[str, Tensor]]]:
        for name, tensor in named_tensors:
            digest.update_many(packer.add(name, tensor))
            yield name.removesuffix(".weight"), {name: tensor}
        packer.check_complete()

    return groups(), digest


def quantize_group(members: tuple[PlanEntry, ...], held: Mapping[str, Tensor], backend: Quantizer) -> dict[str, Tensor]:
    """Codes and scales of the members under one outer amax.

    Equal to quantizing the members stacked along N: blocks run along K, and a 16x16 block never spans two members
    because each has N % 16 == 0.
    """
    how = members[0].weight
    member_amax = [amax for e in members if (amax := operand_amax(held[e.name], how)) is not None]
    amax = torch.stack(member_amax).amax(0) if member_amax else None
    tensors: dict[str, Tensor] = {}
    for entry in members:
        q = backend.quantize(held[entry.name], how, amax=amax)
        assert isinstance(q, QTensor)
        tensors |= {f"{entry.name}.{suffix}": part for suffix, part in to_parts(q).items()}
    return tensors


def check_tensor(name: str, tensor: Tensor, plan: PrecisionPlan, shapes: Shapes | None) -> None:
    """SyncError for a tensor that is not the model's, not of the plan's shape, or not finite."""
    if shapes is not None and name not in shapes:
        raise SyncError(f"{name}: not a parameter of this model, yet exported")
    entry = plan.get(name.removesuffix(".weight"))
    want = shapes[name] if shapes is not None else (entry.n, entry.k) if entry else tuple(tensor.shape)
    if tuple(tensor.shape) != want:
        raise SyncError(f"{name}: exported with shape {list(tensor.shape)}; the plan expects the full {list(want)}")
    if tensor.numel() and not bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):  # they let NaN through
        raise SyncError(
            f"{name}: holds NaN or Inf; a learner that sends it has diverged, resume from an earlier checkpoint"
        )
