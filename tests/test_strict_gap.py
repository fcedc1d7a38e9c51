"""Learner against sampler in one process: the promise of strict alignment, on random weights and mixed batches."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest
import torch

from minite.config import RunConfig, load_recipe, resolve_plan
from minite.learner.worker import LearnerWorker
from minite.sampler import make_engine
from minite.sampler.engine import Completion, Request, SamplingParams
from minite.types import RolloutBatch
from tests.tolerances import STRICT_GAP

RECIPES = Path(__file__).parents[1] / "recipes"
SIZES = ("model.num_layers=4", "model.hidden_size=64", "model.init_std=0.3", "warm_start.steps=0", "learner.device=cpu")


def packed(completions: list[Completion], config: RunConfig, digest: str) -> RolloutBatch:
    rows = [(list(c.prompt_tokens), c.tokens) for c in completions]
    lengths = torch.tensor([len(p) + len(r) for p, r in rows])
    experts = [c.routed_experts for c in completions]
    last = torch.full((1, config.model.num_layers, config.model.experts_per_token), -1, dtype=torch.int16)
    mask_T = torch.tensor([m for p, r in rows for m in [False] * len(p) + [True] * len(r)])
    sampler_T = torch.zeros(int(lengths.sum()), dtype=torch.float64)
    sampler_T[mask_T] = torch.tensor([x for c in completions for x in c.logprobs], dtype=torch.float64)
    count = len(rows)
    return RolloutBatch(
        tokens_T=torch.tensor([t for p, r in rows for t in [*p, *r]]),
        cu_seqlens_S1=torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        loss_mask_T=mask_T,
        sampler_logprob_T=sampler_T,
        reward_S=torch.zeros(count),
        group_S=torch.arange(count),
        advantage_S=torch.zeros(count),
        weight_step_S=torch.zeros(count, dtype=torch.int64),
        plan_digest=digest,
        routed_experts_TLk=torch.cat([part for e in experts if e is not None for part in (e, last)]),
    )


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.parametrize("recipe", ["w4a4_strict", "bf16"])
def test_learner_and_sampler_agree_to_the_last_bit(recipe: str) -> None:
    overrides = [*SIZES, "precision.alignment=strict"]
    config = load_recipe(RECIPES / f"tiny_qwen3_moe_{recipe}_grpo.yaml", overrides)
    plan = resolve_plan(config)
    worker = LearnerWorker(config, plan, 0, 1, "127.0.0.1", free_port())
    try:
        exported = worker.export()
        assert exported is not None
        buckets, version = exported
        engine = make_engine(config, plan)
        engine.begin_update(version)
        for bucket in buckets:
            engine.load_bucket(bucket)
        engine.finish_update()
        draw = random.Random(5)
        requests = [
            Request(
                str(i),
                tuple(draw.randrange(2, 32) for _ in range(draw.randint(1, 20))),
                SamplingParams(draw.randint(1, 24), seed=i),
            )
            for i in range(96)
        ]
        batch = packed(engine.generate(requests), config, plan.digest)
        logprob_T, _ = worker.logprobs(batch)
    finally:
        worker.close()
    gap_N = (logprob_T - batch.sampler_logprob_T)[batch.loss_mask_T]
    assert gap_N.numel() > 500
    assert float(gap_N.abs().max()) <= STRICT_GAP
