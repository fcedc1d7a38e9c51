"""Which parameters are read together and which file their tensors go to: settled before anything is read.

Nothing but the plan, the model and the format decides it, so an interrupted conversion finds its place again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from minite.config.plan import PlanEntry, PrecisionPlan
from minite.sync.stored import Stored, stored_parts
from minite.sync.targets import to_disk
from minite.sync.tensor_file import nbytes_of


@dataclass(frozen=True)
class Unit:
    """One fusion group, or one parameter: what is read, quantized and written at once."""

    names: tuple[str, ...]  # HF parameters, in the order of the plan
    members: tuple[PlanEntry, ...]  # their entries; empty: not quantized
    disk: Mapping[str, Stored]  # what is written

    @property
    def nbytes(self) -> int:
        return sum(nbytes_of(stored) for stored in self.disk.values())


def units(plan: PrecisionPlan, shapes: Mapping[str, tuple[int, ...]], to: str, dtype: torch.dtype) -> list[Unit]:
    """Every parameter of the model once, groups at the place of their first member."""
    result: list[Unit] = []
    done: set[str] = set()
    for name, shape in shapes.items():
        entry = plan.get(name.removesuffix(".weight"))
        if name in done:
            continue
        if entry is None or entry.weight == "bf16":
            members: tuple[PlanEntry, ...] = ()
            names: tuple[str, ...] = (name,)
            parts = {name: Stored(shape, dtype)}
        else:
            members = plan.group_members(entry.group) if entry.group else (entry,)
            names = tuple(f"{e.name}.weight" for e in members)
            parts = {
                f"{e.name}.{suffix}": stored
                for e in members
                for suffix, stored in stored_parts(e.weight, e.n, e.k, dtype).items()
            }
        done.update(names)
        # Stand-ins of the right shape that take no memory; torch's own, device "meta", loads its compiler: 7 s.
        empty = {part: torch.zeros((), dtype=stored.dtype).expand(stored.shape) for part, stored in parts.items()}
        disk = {part: Stored(tuple(t.shape), t.dtype) for part, t in to_disk(to, plan, empty, {}).items()}
        result.append(Unit(names, members, disk))
    return result


def files(all_units: list[Unit], file_bytes: int) -> dict[str, list[Unit]]:
    """File name -> its units: files of at most ``file_bytes``, or of one unit that is larger."""
    cut: list[list[Unit]] = []
    size = file_bytes
    for unit in all_units:
        if size + unit.nbytes > file_bytes:
            cut.append([])
            size = 0
        cut[-1].append(unit)
        size += unit.nbytes
    return {f"model-{i + 1:05d}-of-{len(cut):05d}.safetensors": part for i, part in enumerate(cut)}
