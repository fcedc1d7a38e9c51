"""A model of the failure that fits on a page: the sampler is quantized, the learner is not.

    python scripts/triage_toy.py [--seeds N] [--policies table,mlp] [--corrections none,triage,...] [--json FILE]

About two minutes on one quiet core. A policy answers with LENGTH tokens, each in a random state, and is rewarded by
the share of right ones; GRPO trains it. The sampler sees weights (and, in the MLP, hidden values) through NVFP4 whose
outer scale was measured once, at the start, as a server with calibrated scales does: what grows beyond saturates. So a
wrong token keeps coming with the probability of the start, and each time the learner pushes it down once more. Losses,
advantages and corrections are those of minite.losses; all seeds of a row share every random draw with the other rows.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from triage_placebo import shuffled
from triage_stats import interval, words

from minite.config.schema import AlgoConfig, CorrectionConfig
from minite.formats import nvfp4
from minite.losses.advantage import group_advantage
from minite.losses.correction import correct
from minite.losses.grpo import grpo_loss
from minite.losses.tokens import loss_tokens

# Shape letters: Z seeds, S states, V tokens to choose from, H hidden, N loss tokens of a seed, B = Z * N in all.
STATES, VOCAB, HIDDEN, LENGTH, PROMPTS, GROUP = 48, 16, 32, 8, 4, 8
TAIL = 0.5  # nats: CorrectionConfig.limit_negative

_WIDE = {"kind": "triage", "calm": 0.5, "limit_negative": 2.0, "limit_positive": 4.0, "segment_risk": 2.0}
CORRECTIONS: dict[str, dict[str, object]] = {
    "no mismatch": {"kind": "none"},  # the sampler is not quantized
    "none": {"kind": "none"},
    "tis": {"kind": "tis"},
    "icepop": {"kind": "icepop"},
    "triage": {"kind": "triage"},
    "triage, wide": _WIDE,  # limits above what the sampler's grid makes of a step
    "placebo": {"kind": "triage"},  # TRIAGE's weights, shuffled within each response
}


@dataclass(frozen=True)
class Policy:
    """Where the logits come from, and how it is trained."""

    ceiling: float  # of the quantized values, as a part of the largest at the start
    steps: int
    right: int  # tokens of a state that are right
    lr: float
    adam: bool
    make: Callable[[int, torch.Generator], list[Tensor]]
    logits: Callable[[list[Tensor], Tensor, Rounding | None], Tensor]  # (weights, state_ZN, rounding) -> [Z, N, V]


@dataclass
class Rounding:
    """NVFP4 with an outer scale by seed, measured the first time that a tensor of the name passes."""

    ceiling: float
    largest: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, x_ZRK: Tensor, name: str) -> Tensor:
        x_ZRK = x_ZRK.detach()
        bound = self.largest.setdefault(name, self.ceiling * x_ZRK.abs().amax((1, 2), keepdim=True))
        held = torch.minimum(torch.maximum(x_ZRK, -bound), bound)
        return nvfp4.dequantize(nvfp4.quantize(held, outer="expert", amax=bound.flatten()))


def make_table(seeds: int, generator: torch.Generator) -> list[Tensor]:
    return [torch.randn(seeds, STATES, VOCAB, generator=generator).requires_grad_()]


def table_logits(weights: list[Tensor], state_ZN: Tensor, rounding: Rounding | None) -> Tensor:
    table_ZSV = weights[0] if rounding is None else rounding(weights[0], "table")
    return table_ZSV.gather(1, state_ZN[..., None].expand(-1, -1, VOCAB))


def make_mlp(seeds: int, generator: torch.Generator) -> list[Tensor]:
    """State features, which are not trained, and two layers."""
    feature_ZSH = torch.randn(seeds, STATES, HIDDEN, generator=generator)
    up_ZHH = torch.randn(seeds, HIDDEN, HIDDEN, generator=generator) * math.sqrt(2 / HIDDEN)
    down_ZVH = torch.randn(seeds, VOCAB, HIDDEN, generator=generator) / math.sqrt(HIDDEN)
    return [feature_ZSH, up_ZHH.requires_grad_(), down_ZVH.requires_grad_()]


def mlp_logits(weights: list[Tensor], state_ZN: Tensor, rounding: Rounding | None) -> Tensor:
    feature_ZSH, up_ZHH, down_ZVH = weights
    if rounding is not None:
        up_ZHH, down_ZVH = rounding(up_ZHH, "up"), rounding(down_ZVH, "down")
    hidden_ZSH = torch.relu(feature_ZSH @ up_ZHH.mT)
    if rounding is not None:
        hidden_ZSH = rounding(hidden_ZSH, "hidden")
    return (hidden_ZSH @ down_ZVH.mT).gather(1, state_ZN[..., None].expand(-1, -1, VOCAB))


POLICIES = {
    "table": Policy(1.0, 200, 4, 30.0, False, make_table, table_logits),
    "mlp": Policy(0.7, 300, 1, 5e-3, True, make_mlp, mlp_logits),
}


def train(policy: Policy, correction: str, seeds: int, curve_every: int) -> list[dict]:
    """One row of the table, all seeds at once. Every ``curve_every`` steps: values by seed."""
    start = torch.Generator().manual_seed(0)
    weights = policy.make(seeds, start)
    right_ZSV = torch.rand(seeds, STATES, VOCAB, generator=start).argsort(-1) < policy.right
    trained = [w for w in weights if w.requires_grad]
    optimizer = torch.optim.Adam(trained, policy.lr) if policy.adam else torch.optim.SGD(trained, policy.lr)
    rounding = None if correction == "no mismatch" else Rounding(policy.ceiling)
    config, tokens = CorrectionConfig(**CORRECTIONS[correction]), PROMPTS * GROUP * LENGTH  # type: ignore[arg-type]
    sequence_B = torch.arange(seeds * PROMPTS * GROUP).repeat_interleave(LENGTH)
    mask_B, curve = torch.ones(seeds * tokens, dtype=torch.bool), []
    for step in range(1, policy.steps + 1):
        draw = torch.Generator().manual_seed(step)  # the same in every row: pairs differ in the correction alone
        state_ZN = torch.randint(STATES, (seeds, PROMPTS, 1, LENGTH), generator=draw)
        state_ZN = state_ZN.expand(-1, -1, GROUP, -1).reshape(seeds, tokens)
        token_ZN1, sampler_B = sample(policy.logits(weights, state_ZN, rounding).detach(), draw)
        right_ZN = right_ZSV.gather(1, state_ZN[..., None].expand(-1, -1, VOCAB)).gather(2, token_ZN1)[..., 0]
        reward_S = right_ZN.float().reshape(-1, LENGTH).mean(1)
        group_S = torch.arange(seeds * PROMPTS).repeat_interleave(GROUP)
        advantage_B = group_advantage(reward_S, group_S, normalize_std=True).repeat_interleave(LENGTH)
        logprob_ZNV = policy.logits(weights, state_ZN, None).log_softmax(-1)
        learner_B = logprob_ZNV.gather(2, token_ZN1).flatten()
        seen = (learner_B.detach(), sampler_B, advantage_B, mask_B, sequence_B)
        weight_B = correct(config, *seen, None).weight_T
        if correction == "placebo":
            weight_B = shuffled(weight_B, loss_tokens(*seen), draw)
        # The denominator is one seed's, so the summed loss gives each seed its own gradient.
        loss = grpo_loss(learner_B, learner_B.detach(), advantage_B, mask_B, weight_B, float(tokens), AlgoConfig()).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % curve_every == 0 or step == policy.steps:
            gap_ZN = (learner_B.detach() - sampler_B).reshape(seeds, tokens)
            curve.append(measured(step, reward_S, gap_ZN, advantage_B.reshape(seeds, tokens), logprob_ZNV.detach()))
    return curve


def sample(logits_ZNV: Tensor, draw: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [Z, N, 1] and their log-probs [B]."""
    logprob_ZNV = logits_ZNV.log_softmax(-1)
    noise = torch.rand(logits_ZNV.shape, generator=draw)
    token_ZN1 = (logprob_ZNV - noise.log().neg().log()).argmax(-1, keepdim=True)  # Gumbel-max: one draw serves all rows
    return token_ZN1, logprob_ZNV.gather(2, token_ZN1).flatten()


def measured(step: int, reward_S: Tensor, gap_ZN: Tensor, advantage_ZN: Tensor, logprob_ZNV: Tensor) -> dict:
    """What a step looks like, by seed."""
    seeds = len(gap_ZN)
    return {
        "step": step,
        "reward": reward_S.reshape(seeds, -1).mean(1).tolist(),
        "entropy": (-(logprob_ZNV.exp() * logprob_ZNV).sum(-1).mean(1)).tolist(),
        "abs gap": gap_ZN.abs().mean(1).tolist(),
        "gap p0.1": gap_ZN.quantile(0.001, dim=1).tolist(),
        "negative tail": ((gap_ZN < -TAIL) & (advantage_ZN < 0)).float().mean(1).tolist(),
    }


def row(name: str, curve: list[dict], base: list[dict] | None) -> str:
    """Reward and entropy over the last quarter, the tail after the first quarter and in the last."""
    part = max(len(curve) // 4, 1)
    early, late = curve[part - 1 : part], curve[-part:]

    def mean(points: list[dict], key: str) -> list[float]:
        return [statistics.fmean(values) for values in zip(*(p[key] for p in points), strict=True)]

    reward = mean(late, "reward")
    paired = "" if base is None else words(interval([a - b for a, b in zip(reward, mean(base[-part:], "reward"),
                                                                            strict=True)]), sign="+")  # fmt: skip
    cells = [words(interval(reward)), paired, words(interval(mean(late, "entropy")))]
    cells += [words(interval(mean(points, "gap p0.1")), digits=2) for points in (early, late)]
    grown = [b - a for a, b in zip(mean(early, "gap p0.1"), mean(late, "gap p0.1"), strict=True)]
    return f"| {name} | " + " | ".join([*cells, words(interval(grown), sign="+", digits=2)]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--corrections", default=";".join(CORRECTIONS), help="separated by ; (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the curves by seed")
    args = parser.parse_args()
    torch.set_num_threads(1)
    started, found = time.time(), {}
    for policy in args.policies.split(","):
        print(f"\n{policy}, {POLICIES[policy].steps} steps, {args.seeds} seeds, mean and 95 % interval; gaps in nats\n")
        print("| correction | reward | minus none, paired | entropy | gap p0.1, early | gap p0.1, end | growth |")
        print("|---|---|---|---|---|---|---|", flush=True)
        curves = found.setdefault(policy, {})
        # "none" first: the other rows are compared with it.
        for name in sorted(args.corrections.split(";"), key=lambda name: name != "none"):
            curves[name] = train(POLICIES[policy], name, args.seeds, max(POLICIES[policy].steps // 20, 1))
            print(row(name, curves[name], curves.get("none") if name != "none" else None), flush=True)
    if args.json:
        args.json.write_text(json.dumps(found))
    print(f"\n{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
