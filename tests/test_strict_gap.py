"""Learner against sampler in one process: the promise of strict alignment, on random weights and mixed batches."""

from __future__ import annotations

import random
import socket
from pathlib import Path

import pytest

from minite.config import load_recipe, resolve_plan
from minite.driver.buffer import Group, pack
from minite.driver.data import Example, Prompt
from minite.learner.worker import LearnerWorker
from minite.sampler import make_engine
from minite.sampler.engine import Request, SamplingParams
from tests.tolerances import STRICT_GAP

RECIPES = Path(__file__).parents[1] / "recipes"
# The same sizes as a dense model without QK norm.
LLAMA = (
    "model.kind=llama", "model.num_experts=0", "model.experts_per_token=0", "model.moe_intermediate_size=0",
    "model.intermediate_size=96", "model.rope_theta=100000", "model.tie_word_embeddings=true",
    'precision.rules=[{match: "model.layers.**", use: w4a4}, {match: "**", use: bf16}]',
)  # fmt: skip
SIZES = ("model.num_layers=4", "model.hidden_size=64", "model.init_std=0.3", "warm_start.steps=0", "learner.device=cpu")


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("w4a4_strict", []),
        ("bf16", []),
        ("w4a4_strict", ["sampler.temperature=0.7"]),
        ("w4a4_strict", ["algo.router_replay=false"]),  # each side routes by itself
        ("w4a4_strict", [*LLAMA]),
    ],
    ids=["w4a4", "bf16", "temperature", "no replay", "llama"],
)
def test_learner_and_sampler_agree_to_the_last_bit(recipe: str, settings: list[str]) -> None:
    overrides = [*SIZES, "precision.alignment=strict", *settings]
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
                SamplingParams(draw.randint(1, 24), config.sampler.temperature, seed=i),
            )
            for i in range(96)
        ]
        completions = engine.generate(requests)
        groups = [
            Group(Prompt(i, Example("", "", ""), c.prompt_tokens), (c,), (0.0,)) for i, c in enumerate(completions)
        ]
        batch = pack(groups, plan.digest)
        logprob_T, _ = worker.logprobs(batch)
    finally:
        worker.close()
    gap_N = (logprob_T - batch.sampler_logprob_T)[batch.loss_mask_T]
    assert gap_N.numel() > 500
    assert float(gap_N.abs().max()) <= STRICT_GAP
