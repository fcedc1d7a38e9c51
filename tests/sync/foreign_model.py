"""The small model as others export it: ModelOpt and compressed-tensors, split, fused, or with experts stacked."""

from __future__ import annotations

from pathlib import Path

import torch
from disk_model import save
from small_model import weights
from torch import Tensor

from minite.config import PrecisionPlan, RunConfig, resolve_plan
from minite.formats import QTensor, quantize_operand
from minite.formats.conventions import CONVENTIONS

FUSED = (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj")))
INPUT_SCALE = 0.25


def quantized(config: RunConfig, tied: bool = True) -> dict[str, QTensor]:
    """Every quantized linear; ``tied``: members of a fusion group share an outer scale."""
    plan, full = resolve_plan(config), weights(config)
    result = {}
    for entry in plan:
        if entry.quantized:
            members = plan.group_members(entry.group) if entry.group and tied else (entry,)
            amax = torch.stack([full[f"{e.name}.weight"].float().abs().amax() for e in members]).amax()
            result[entry.name] = quantize_operand(full[f"{entry.name}.weight"], entry.weight, amax=amax)
    return result


def export(q: QTensor, convention: str) -> dict[str, Tensor]:
    """Suffix -> tensor of one linear."""
    outer = CONVENTIONS[convention].outer_of(q.amax)
    if convention == "modelopt":
        parts = {"weight": q.codes, "weight_scale": q.block_scale, "weight_scale_2": outer}
        return parts | {"input_scale": torch.tensor(INPUT_SCALE)}
    parts = {"weight_packed": q.codes, "weight_scale": q.block_scale, "weight_global_scale": outer.reshape(1)}
    return parts | {"input_global_scale": torch.tensor([1 / INPUT_SCALE])}


def tensors(config: RunConfig, convention: str = "modelopt", tied: bool = True) -> dict[str, Tensor]:
    """All tensors, split: what such a checkpoint holds."""
    plan = resolve_plan(config)
    named = {n: t for n, t in weights(config).items() if not _quantized(plan, n)}
    for module, q in quantized(config, tied).items():
        named |= {f"{module}.{suffix}": part for suffix, part in export(q, convention).items()}
    return named


def fuse(named: dict[str, Tensor]) -> dict[str, Tensor]:
    """q, k, v and gate, up stacked along rows, numbers of each member kept beside each other."""
    named = dict(named)
    for fused, members in FUSED:
        for first in [n for n in named if f".{members[0]}." in n]:
            head, _, part = first.partition(f".{members[0]}.")
            parts = [named.pop(f"{head}.{member}.{part}") for member in members]
            named[f"{head}.{fused}.{part}"] = join([p.reshape(1) if p.numel() == 1 else p for p in parts])
    return named


def stack_experts(named: dict[str, Tensor], experts: int) -> dict[str, Tensor]:
    """mlp.experts.E.X.part -> mlp.experts.X_part with a leading expert axis, the weight under the module's own name."""
    named = dict(named)
    for first in [n for n in named if ".experts.0." in n]:
        head, _, tail = first.partition(".experts.0.")
        module, part = tail.split(".")
        rows = [named.pop(f"{head}.experts.{e}.{tail}") for e in range(experts)]
        name = f"{head}.experts.{module}" + ("" if part == "weight" else f"_{part}")
        named[name] = (
            torch.stack([row.view(torch.uint8) for row in rows]).view(rows[0].dtype)
            if rows[0].ndim
            else (torch.stack(rows))
        )
    return named


def join(parts: list[Tensor]) -> Tensor:
    """Concatenated rows, also of FP8, which torch.cat does not take."""
    dtype = parts[0].dtype
    wide = dtype.itemsize > 1
    return torch.cat(parts if wide else [part.view(torch.uint8) for part in parts]).view(dtype)


def directory(path: Path, config: RunConfig, named: dict[str, Tensor]) -> Path:
    """Written as an HF directory."""
    return save(path, {name: tensor.clone() for name, tensor in named.items()}, config)


def _quantized(plan: PrecisionPlan, name: str) -> bool:
    entry = plan.get(name.removesuffix(".weight"))
    return entry is not None and entry.quantized
