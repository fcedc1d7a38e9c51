"""Quantized weights, made once per weight version."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from minite.backends.base import Operand


@dataclass(frozen=True)
class PreparedWeight:
    """One version of a weight, as GEMMs and gradients read it."""

    quantized: Operand  # codes and scales (the plain weight for bf16): exported, and dequantized for gradients
    operand: object  # Backend.prepare of it


@dataclass(frozen=True)
class _Stamp:
    """What identifies the content of one tensor as far as torch can tell."""

    tensor: weakref.ref[Tensor]
    version: int
    address: int

    @classmethod
    def of(cls, w: Tensor) -> _Stamp:
        return cls(weakref.ref(w), w._version, w.data_ptr())

    def matches(self, w: Tensor) -> bool:
        return self.tensor() is w and self.version == w._version and self.address == w.data_ptr()


class WeightCache:
    """Holds the prepared form of one weight, or of the weights of one layer's experts.

    The entry is used as long as the very same tensor objects are passed, none was written in place since (torch counts
    writes in ``Tensor._version``: ``copy_``, the steps of torch's plain and foreach optimizers), none was re-pointed
    (``.data = ...``), and ``invalidate`` was not called. Torch does not count writes through ``w.data``, through a
    flat buffer that ``w.data`` was pointed into (megatron's distributed optimizer), and of its fused optimizers.
    So a learner calls ``invalidate`` of every cache after each write to its parameters, whatever the optimizer.
    """

    def __init__(self) -> None:
        self._stamps: tuple[_Stamp, ...] = ()
        self._entry: PreparedWeight | None = None

    def get(self, weights: Sequence[Tensor], make: Callable[[], PreparedWeight]) -> PreparedWeight:
        """The entry of these weights; ``make`` is called when there is none or it is stale."""
        fresh = len(self._stamps) == len(weights) and all(
            stamp.matches(w) for stamp, w in zip(self._stamps, weights, strict=True)
        )
        if self._entry is None or not fresh:
            self.invalidate()  # before make, so that two versions are never in memory together
            self._entry, self._stamps = make(), tuple(_Stamp.of(w) for w in weights)
        return self._entry

    def invalidate(self) -> None:
        """Drops the entry: the next ``get`` makes it anew."""
        self._stamps, self._entry = (), None
