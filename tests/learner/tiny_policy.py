"""A policy small enough for tests, batches for it, and a learner of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from minite.config import RunConfig, resolve_plan
from minite.config.schema import FormatConfig, LearnerConfig, ModelConfig, PrecisionConfig, RuleConfig, WarmStartConfig
from minite.learner.worker import LearnerWorker
from minite.ports import LOOPBACK, free_port
from minite.types import RolloutBatch

VOCAB = 48
LAYERS = 2
HIGH_PRECISION = (RuleConfig("bf16", "lm_head"), RuleConfig("bf16", "model.layers.*.mlp.gate"))


def recipe(
    kind: str = "qwen3_moe", precision: str = "bf16", alignment: str = "aligned", **changes: object
) -> RunConfig:
    """A recipe. ``precision``: bf16 | w4a4 (every linear that may be). ``changes``: sections or ``dtype``."""
    sizes = {"num_experts": 6, "experts_per_token": 2, "moe_intermediate_size": 32}
    model = ModelConfig(
        kind=kind,
        num_layers=LAYERS,
        hidden_size=64,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        vocab_size=VOCAB,
        init_std=0.1,  # large enough that routing and attention are far from uniform
        dtype=str(changes.pop("dtype", "bf16")),
        **(sizes if kind == "qwen3_moe" else {"intermediate_size": 96}),
    )
    rules = (*(HIGH_PRECISION if kind == "qwen3_moe" else HIGH_PRECISION[:1]), RuleConfig("w4a4", "**"))
    plan = PrecisionConfig(alignment=alignment)
    if precision == "w4a4":
        plan = PrecisionConfig({"w4a4": FormatConfig("nvfp4_1d", "nvfp4_row")}, rules, alignment=alignment)
    config = RunConfig(name="tiny", model=model, seed=5, precision=plan, warm_start=WarmStartConfig(lr=3e-3))
    return dataclasses.replace(config, learner=LearnerConfig(device="cpu", lr=1e-3), **changes)


def layout(config: RunConfig, **parallel: int) -> RunConfig:
    """The recipe with other settings of the learner."""
    return dataclasses.replace(config, learner=dataclasses.replace(config.learner, **parallel))


def batch(lengths: list[int], seed: int = 0, replay: bool = False) -> RolloutBatch:
    """Random responses; the first two tokens of each are prompt. Advantages, weights and old log-probs are random."""
    g = torch.Generator().manual_seed(seed)
    total, count = sum(lengths), len(lengths)
    cu = torch.tensor([0, *lengths]).cumsum(0)
    position = torch.cat([torch.arange(n) for n in lengths])
    experts = torch.rand(total, LAYERS, 6, generator=g).argsort(-1)[..., :2].to(torch.int16)
    return RolloutBatch(
        tokens_T=torch.randint(0, VOCAB, (total,), generator=g),
        cu_seqlens_S1=cu,
        loss_mask_T=position >= 2,
        sampler_logprob_T=torch.zeros(total, dtype=torch.float64),
        reward_S=torch.zeros(count),
        group_S=torch.zeros(count, dtype=torch.int64),
        advantage_S=torch.randn(count, generator=g),
        weight_step_S=torch.zeros(count, dtype=torch.int64),
        plan_digest="",
        routed_experts_TLk=experts if replay else None,
        old_logprob_T=-3.5 - 0.2 * torch.rand(total, generator=g, dtype=torch.float64),
        weight_T=torch.rand(total, generator=g),
    )


@contextmanager
def learner(config: RunConfig, rank: int = 0, world: int = 1, port: int | None = None) -> Iterator[LearnerWorker]:
    """A learner rank for the time of a ``with`` block."""
    worker = LearnerWorker(config, resolve_plan(config), rank, world, LOOPBACK, port or free_port())
    try:
        yield worker
    finally:
        worker.close()


def optimizer_bits(policy: Any) -> list[torch.Tensor]:
    """Copies of the master weights, moments and step counts."""
    from minite.learner.optimizer import _adam_states

    pairs = _adam_states(policy.optimizer)
    return [t.detach().clone() for p, s in pairs for t in (p, s["exp_avg"], s["exp_avg_sq"], s["step"])]
