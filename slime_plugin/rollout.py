"""The gap and the correction weights of a whole rollout, between slime's log-probs and its first training step.

slime keeps a rollout as lists over responses, each tensor over response tokens, split over the data-parallel ranks.
Every rank gathers all of them and computes the same weights by ``minite.losses.correction.correct``, so neither the
split nor the packing into microbatches can change them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from minite.config.schema import CorrectionConfig
from minite.diagnostics.gap import gap_metrics, gap_summary
from minite.errors import UserError
from minite.losses.correction import correct
from minite.losses.triage_state import TriageState

Responses = list[dict[str, Tensor]]  # by response: tensors over its tokens, on the CPU
Gather = Callable[[Responses], list[Responses]]  # own responses -> those of every data-parallel rank, by rank

_KEYS = ("log_probs", "rollout_log_probs", "advantages", "loss_masks")


@dataclass(frozen=True)
class Weighed:
    """What a rollout was found to be."""

    weights: list[Tensor]  # float32 [tokens], of this rank's responses
    metrics: dict[str, float]  # of the whole rollout
    unhealthy: bool


def weigh(
    rollout_data: Mapping[str, Any], config: CorrectionConfig, state: TriageState, rank: int, gather: Gather
) -> Weighed:
    """Correction weights of the responses of data-parallel rank ``rank``.

    Args: rollout_data holds slime's lists of ``_KEYS``: log-probs of the learner before training and of the sampler
    [nats], advantages, loss masks. state is changed in place, on every rank alike.
    Raises: UserError where slime has not computed what is needed.
    """
    missing = [key for key in _KEYS if not rollout_data.get(key)]
    if missing:
        raise UserError(
            f"rollout_data has no {missing[0]}, expected {', '.join(_KEYS)} on the last pipeline stage; "
            "slime computes log_probs before training with --get-mismatch-metrics, which minite launch sets"
        )
    own: Responses = [
        {key: rollout_data[key][i].detach().cpu() for key in _KEYS} for i in range(len(rollout_data["loss_masks"]))
    ]
    ranks = gather(own)
    everything = [response for responses in ranks for response in responses]
    logprob_T, sampler_T, advantage_T, mask_T = (torch.cat([r[key] for r in everything]) for key in _KEYS)
    lengths = [response["loss_masks"].numel() for response in everything]
    sequence_T = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    out = correct(config, logprob_T, sampler_T, advantage_T, mask_T.bool(), sequence_T, state)
    summary = gap_summary(logprob_T, sampler_T, advantage_T, mask_T.bool())
    before = sum(len(responses) for responses in ranks[:rank])
    weights = list(out.weight_T.split(lengths))[before : before + len(own)]
    return Weighed(weights, {**gap_metrics(summary), **out.metrics}, out.unhealthy)


class WeightBook:
    """Carries the weights to the loss, through slime's closed list of batch keys.

    slime's microbatches hold the very tensors of the rollout, so a response is known by its rollout_log_probs object.
    """

    def __init__(self) -> None:
        self._by_id: dict[int, tuple[Tensor, Tensor]] = {}

    def write(self, sampler_logprobs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        """Forget the last rollout; remember the weight of each response, on the device of its log-probs."""
        # The tensors are kept too: an id is unique only while its object lives.
        pairs = zip(sampler_logprobs, weights, strict=True)
        self._by_id = {id(logprob): (logprob, weight.to(logprob.device)) for logprob, weight in pairs}

    def read(self, sampler_logprobs: Sequence[Tensor]) -> Tensor:
        """Weights of the responses of a microbatch, end to end. float32 [tokens]. UserError for an unknown response."""
        found = [self._by_id.get(id(logprob)) for logprob in sampler_logprobs]
        if any(entry is None for entry in found):
            raise UserError(
                "the loss got rollout_log_probs that are not those of this rollout: was slime_plugin.hooks.postprocess "
                "given as --rollout-data-postprocess-path? slime may also copy them since the version that was read"
            )
        return torch.cat([entry[1] for entry in found if entry is not None]) if found else torch.zeros(0)
