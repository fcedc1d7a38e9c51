"""Scales of one quantized module, read in pieces: how many saturate, vanish or are no numbers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from minite.sync.checkpoint import Checkpoint
from minite.sync.inspect.modules import FP8_BLOCK, Module

PIECE = 64 << 20  # bytes read at once
_SIGNLESS = 0x7777777777777777  # eight bytes of codes without their signs


@dataclass
class ScaleStats:
    """Counts of blocks of an NVFP4 module; of an FP8 one, ``nan`` counts elements and scales, and the rest is 0."""

    blocks: int = 0
    saturated: int = 0  # scale 448, the largest: of a good checkpoint at least one for each outer scale
    underflowed: int = 0  # scale 0 over codes that are not: they read as 0
    zero: int = 0  # all codes 0
    nan: int = 0
    negative: int = 0
    outer: tuple[float, ...] = ()  # outer scales as stored, one per matrix
    input: tuple[float, ...] = ()


def measure(reader: Checkpoint, module: Module) -> ScaleStats:
    """Read a module whose structure is sound. Memory: a few times PIECE."""
    stats = ScaleStats()
    assert module.scheme is not None
    codes_name, scale_name = module.parts[module.scheme.codes], module.parts[module.scheme.block]
    if module.format == FP8_BLOCK:
        scale = reader.read(scale_name).float()
        stats.nan = int((~torch.isfinite(scale) | (scale <= 0)).sum())
        for codes in _pieces(reader, codes_name):
            stats.nan += int((codes.view(torch.uint8) & 0x7F == 0x7F).sum())
        return stats
    for codes, scale in zip(_pieces(reader, codes_name), _pieces(reader, scale_name, 8), strict=True):
        _count(stats, codes, scale.view(torch.uint8))
    stats.outer, stats.input = (
        tuple(reader.read(module.parts[part]).reshape(-1).tolist()) if part in module.parts else ()
        for part in (module.scheme.outer, module.scheme.input)
    )
    return stats


def _count(stats: ScaleStats, codes: Tensor, scale: Tensor) -> None:
    magnitude = scale & 0x7F
    is_zero = (codes.reshape(-1).view(torch.int64) & _SIGNLESS == 0).view(scale.shape)
    stats.blocks += scale.numel()
    stats.saturated += int((magnitude == 0x7E).sum())
    stats.underflowed += int(((magnitude == 0) & ~is_zero).sum())
    stats.zero += int(is_zero.sum())
    stats.nan += int((magnitude == 0x7F).sum())
    stats.negative += int(((scale > 0x80) & (magnitude != 0x7F)).sum())


def _pieces(reader: Checkpoint, name: str, bytes_each: int = 1) -> Iterator[Tensor]:
    """The tensor cut along its first axis. ``bytes_each``: of the codes for each byte of it, so that cuts agree."""
    slot = reader.slot(name)
    rows = slot.shape[0]
    row = max(1, slot.nbytes * bytes_each // max(1, rows))
    step = max(1, PIECE // row)
    for first in range(0, rows, step):
        yield reader.read(name, first, min(step, rows - first))
