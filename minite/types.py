"""Data that crosses package borders: no behaviour beyond derived sizes and invariants.

Packed layout: a batch holds S responses, each one sequence of prompt + response tokens. All sequences lie end to end
in one axis T (total tokens); ``cu_seqlens_S1`` holds the S + 1 offsets. A per-token value at position t speaks of
token t: ``logprob_T[t] = log p(tokens_T[t] | tokens before t in its sequence)`` and is 0 at the first token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace

import torch
from torch import Tensor


@dataclass(frozen=True)
class WeightVersion:
    """Which weights produced something. Equal versions mean equal bytes under the equal plan."""

    step: int  # optimizer steps done when these weights were exported
    plan_digest: str  # PrecisionPlan.digest of the learner
    weight_digest: str  # sync.verify digest of the exported tensors


@dataclass
class RolloutBatch:
    """One rollout: what the sampler produced and the learner needs, in the packed layout.

    Log-probs are float64 so that both FP32 (off, aligned) and FP64 (strict) values survive unchanged. [nats]
    """

    tokens_T: Tensor  # int64
    cu_seqlens_S1: Tensor  # int64, S + 1 offsets, first 0, last T
    loss_mask_T: Tensor  # bool, True on response tokens that count
    sampler_logprob_T: Tensor  # float64, of the distribution sampled from; 0 off the mask
    reward_S: Tensor  # float32
    group_S: Tensor  # int64, id of the prompt: responses of one prompt share it
    advantage_S: Tensor  # float32, filled by losses.advantage; 0 before
    weight_step_S: Tensor  # int64, WeightVersion.step that sampled the response
    plan_digest: str
    routed_experts_TLk: Tensor | None = None  # int16, expert ids by position and MoE layer; -1 = not recorded
    old_logprob_T: Tensor | None = None  # float64, learner's recompute before its update; same weights unless ahead
    weight_T: Tensor | None = None  # float32, correction weight by token; None = all ones

    @property
    def num_tokens(self) -> int:
        return int(self.tokens_T.numel())

    @property
    def num_sequences(self) -> int:
        return int(self.cu_seqlens_S1.numel()) - 1

    @property
    def sequence_T(self) -> Tensor:
        """Index of the response that owns each token. int64 [T]."""
        lengths_S = self.cu_seqlens_S1.diff()
        return torch.repeat_interleave(torch.arange(self.num_sequences), lengths_S)

    def select(self, index_S: Tensor) -> RolloutBatch:
        """The batch of the given responses, in the given order. index_S int64."""
        starts, ends = self.cu_seqlens_S1[:-1][index_S], self.cu_seqlens_S1[1:][index_S]
        spans = [torch.arange(int(a), int(b)) for a, b in zip(starts, ends, strict=True)]
        token_index = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
        cu = torch.zeros(index_S.numel() + 1, dtype=torch.int64)
        cu[1:] = (ends - starts).cumsum(0)
        changes: dict[str, Tensor] = {"cu_seqlens_S1": cu}
        for f in fields(self):
            value = getattr(self, f.name)
            if not isinstance(value, Tensor) or f.name == "cu_seqlens_S1":
                continue
            changes[f.name] = value[index_S if f.name.endswith("_S") else token_index]
        return replace(self, **changes)


@dataclass
class LossOutput:
    """What a loss returns: the scalar to differentiate and plain-float metrics (sums, not means: see losses/README)."""

    loss: Tensor  # scalar; already divided by the global number of loss tokens
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class GapSummary:
    """The log-prob gap (learner - sampler) over the loss tokens of one batch. [nats]"""

    tokens: int
    abs_mean: float
    abs_p99: float
    abs_max: float
    mean: float
    p001: float
    p01: float
    p50: float
    p99: float
    p999: float
    ess: float  # effective sample size of exp(gap), as a fraction of the tokens
    corr_advantage: float  # Pearson correlation of gap and advantage
    nonfinite: int
