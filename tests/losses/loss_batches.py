"""Made-up packed batches for the loss tests: prompts, masked tokens inside responses, one-token responses."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

# Gaps [nats] and advantages that have broken such code before: around zero, beyond exp, and not numbers at all.
EXTREME_GAPS = (0.0, 1e-8, -1e-8, 0.3, -0.3, 50.0, -50.0, 1e4, -1e4, float("inf"), float("-inf"), float("nan"))
EXTREME_ADVANTAGES = (0.0, 1.0, -1.0, 1e6, -1e6)


@dataclass
class Batch:
    old: Tensor
    sampler: Tensor
    advantage: Tensor
    mask: Tensor
    sequence: Tensor

    def args(self) -> tuple[Tensor, ...]:
        return self.old, self.sampler, self.advantage, self.mask, self.sequence

    def take(self, index_N: Tensor) -> Batch:
        return Batch(*(value[index_N] for value in self.args()))

    def poisoned(self) -> Batch:
        """The same batch with nan, inf and huge numbers wherever the mask is off."""
        poison_T = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e30]).double()
        poison_T = poison_T.repeat(self.mask.numel() // 4 + 1)[: self.mask.numel()]
        changes = {
            f.name: torch.where(self.mask, getattr(self, f.name), poison_T)
            for f in fields(self)
            if f.name not in ("mask", "sequence")
        }
        return replace(self, **changes)


def random_batch(seed: int, lengths: tuple[int, ...] = (1, 5, 40, 17, 3, 64), scale: float = 0.4) -> Batch:
    """Responses of the given numbers of loss tokens after prompts of 0-4 tokens; every eighth token is masked out."""
    rng = torch.Generator().manual_seed(seed)
    masks, sequences, advantages = [], [], []
    for s, length in enumerate(lengths):
        prompt = int(torch.randint(0, 5, (), generator=rng))
        inside = torch.ones(length + length // 8, dtype=torch.bool)
        inside[8::9] = False
        mask = torch.cat([torch.zeros(prompt, dtype=torch.bool), inside])
        masks.append(mask)
        sequences.append(torch.full((mask.numel(),), s))
        advantages.append(torch.randn((), generator=rng, dtype=torch.float64).expand(mask.numel()))
    mask = torch.cat(masks)
    old = -torch.rand(mask.numel(), generator=rng, dtype=torch.float64) * 3
    gap = scale * torch.randn(mask.numel(), generator=rng, dtype=torch.float64) ** 3
    return Batch(old, old - gap, torch.cat(advantages), mask, torch.cat(sequences))


def batch_of(gaps: list[list[float]], advantages: list[float]) -> Batch:
    """One response per list of gaps, without prompts."""
    gap = torch.tensor([d for response in gaps for d in response], dtype=torch.float64)
    lengths = torch.tensor([len(response) for response in gaps], dtype=torch.int64)
    sequence = torch.repeat_interleave(torch.arange(len(gaps)), lengths)
    advantage = torch.tensor(advantages, dtype=torch.float64)[sequence]
    # The sampler's log-prob carries the gap; old = 0 keeps old - sampler exact for every finite gap.
    return Batch(torch.zeros_like(gap), -gap, advantage, torch.ones_like(gap, dtype=torch.bool), sequence)


def extreme_batch() -> Batch:
    """Every extreme gap with every extreme advantage, as one-token responses and as long ones."""
    gaps = [[d] for d in EXTREME_GAPS for _ in EXTREME_ADVANTAGES] + [list(EXTREME_GAPS) for _ in EXTREME_ADVANTAGES]
    return batch_of(gaps, [*EXTREME_ADVANTAGES] * len(EXTREME_GAPS) + [*EXTREME_ADVANTAGES])
