"""Tensor parallelism of an engine: which part of a weight a scheduler holds, and the digest of the whole of it.

As Megatron and SGLang cut: q, k, v, gate, up by rows (N), o and down by columns (K), of every expert too; embedding and
LM head by words; norms and router are whole everywhere. Parts are cut at block borders, so a part has the codes and
scales of the whole matrix, byte for byte. An input that is cut, that of o and down, takes its outer scale from the
amax of all parts (``reduction``).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from minite.config.operands import OPERANDS
from minite.config.plan import PlanEntry, PrecisionPlan
from minite.config.schema import ModelConfig
from minite.errors import UserError
from minite.layers.matmul import AmaxReduction
from minite.sampler.embedded.weights import Linear, Weights
from minite.sampler.sglang.ranks import Ranks
from minite.sync.errors import SyncError
from minite.sync.verify import Digest

BY_COLUMNS = ("o_proj", "down_proj")  # the others are cut by rows
BY_WORDS = ("model.embed_tokens.weight", "lm_head.weight")


def check(plan: PrecisionPlan, model: ModelConfig, size: int) -> None:
    """Raises UserError when ``size`` ranks would cut a head or a quantization block."""
    for name in ("num_heads", "num_kv_heads"):
        if getattr(model, name) % size:
            raise UserError(
                f"sampler.tensor_parallel is {size}, which does not divide model.{name} {getattr(model, name)}; "
                "lower it"
            )
    for entry in plan:
        if entry.name.rpartition(".")[2] in ("gate", "lm_head"):
            continue
        axis, length = ("columns", entry.k) if by_columns(entry.name) else ("rows", entry.n)
        operands = (entry.weight, entry.input) if axis == "columns" else (entry.weight,)
        for operand in operands:
            block = OPERANDS[operand].k_multiple if axis == "columns" else OPERANDS[operand].rows_multiple
            if length % (size * block):
                raise UserError(
                    f"sampler.tensor_parallel: {entry.name} would be cut into pieces of {length / size:g} {axis}, but "
                    f"{operand} has blocks of {block}; lower tensor_parallel or leave this module in bf16"
                )


def by_columns(module: str) -> bool:
    """True for a linear whose input is cut: its weight is cut along K."""
    return module.rpartition(".")[2] in BY_COLUMNS


def reduction(module: str, ranks: Ranks) -> AmaxReduction | None:
    """How the amax of this linear's input is found where the input is cut; None: every rank has all of it."""
    return ranks.largest if ranks.size > 1 and by_columns(module) else None


class ShardedWeights(Weights):
    """Weights of which this process holds its part. With one rank, Weights."""

    def __init__(self, plan: PrecisionPlan, model: ModelConfig, device: torch.device, ranks: Ranks) -> None:
        super().__init__(plan, model, device)
        self.ranks = ranks
        self._cut_modules: set[str] = set()  # linears of which a rank holds a part
        self._words: dict[str, Tensor] = {}  # parameters of SGLang's that are cut by words, padding included

    def adopt(self, name: str, parameter: Tensor) -> None:
        """Use a parameter of SGLang's: a whole tensor, or this rank's words; padded at the end of the vocabulary."""
        rows = self.stored[name].shape[0]
        if name in BY_WORDS:
            self._words[name] = parameter
            rows = len(self._own_words(name))
        self.views[name] = parameter[:rows]

    def part(self, name: str, tensor: Tensor) -> Tensor:
        """This rank's part of a whole tensor."""
        if name in self._words:
            words = self._own_words(name)
            return tensor[words.start : words.stop]
        axis = self._axis(name)
        return tensor if axis is None else tensor.chunk(self.ranks.size, axis)[self.ranks.rank]

    def digest(self) -> Digest:
        """Of whole tensors, wherever their parts lie: each rank hashes its share of them. Collective."""
        if self.ranks.size == 1:
            return super().digest()
        mine, whole = Digest(), {name for name in self.stored if name not in self._words and self._axis(name) is None}
        mine.update_many({name: self.views[name] for name in whole})
        for linear in self.linears:
            self._hash_cut(linear, mine)
        for number, (name, padded) in enumerate(self._words.items()):
            parts = [part[: len(self._own_words(name, r))] for r, part in enumerate(self.ranks.parts(padded))]
            if number % self.ranks.size == self.ranks.rank:
                mine.update(name, torch.cat(parts))
        return self._together(mine)

    def _linear(self, entries: list[list[PlanEntry]], grouped: bool) -> Linear:
        return super()._linear([[self._cut(entry) for entry in members] for members in entries], grouped)

    def _cut(self, entry: PlanEntry) -> PlanEntry:
        self._cut_modules.add(entry.name)
        axis = "k" if by_columns(entry.name) else "n"
        return replace(entry, **{axis: getattr(entry, axis) // self.ranks.size})

    def _axis(self, name: str) -> int | None:
        """Along which a sent tensor is cut; None: it is whole on every rank."""
        module, _, suffix = name.rpartition(".")
        if self.ranks.size == 1 or suffix == "weight_amax" or module not in self._cut_modules:
            return None
        return 1 if by_columns(module) else 0

    def _hash_cut(self, linear: Linear, digest: Digest) -> None:
        """Add this rank's share of the tensors of a GEMM. Buffers are gathered, which are few; tensors are many."""
        for suffix, buffer in linear.buffers.items():
            names = [name for name in linear.views if name.endswith(f".{suffix}") and self._axis(name) is not None]
            if not names:
                continue
            parts, whole = self.ranks.parts(buffer), {}
            for name in names[self.ranks.rank :: self.ranks.size]:
                view, axis = linear.views[name], self._axis(name)
                assert axis is not None
                at = (view.shape, view.stride(), view.storage_offset())
                whole[name] = torch.cat([part.as_strided(*at) for part in parts], axis)
            digest.update_many(whole)

    def _together(self, mine: Digest) -> Digest:
        """What the ranks have hashed. A tensor that is whole on every rank must be the same on all."""
        total = Digest()
        for rank, parts in enumerate(self.ranks.everyones(mine.parts)):
            for name, digest in parts.items():
                if total.parts.setdefault(name, digest) != digest:
                    raise SyncError(f"{name}: rank {rank} of the engine holds other bytes than rank 0")
        return total

    def _own_words(self, name: str, rank: int | None = None) -> range:
        """Rows of the whole tensor that a rank holds."""
        per_rank, rows = self._words[name].shape[0], self.stored[name].shape[0]
        first = per_rank * (self.ranks.rank if rank is None else rank)
        return range(min(first, rows), min(first + per_rank, rows))
