"""Learner against sampler in one process, on random weights and mixed batches: strict, and aligned on a GPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from torch import Tensor

from minite.config import RunConfig, load_recipe, resolve_plan
from minite.driver.buffer import Group, pack
from minite.driver.data import Example, Prompt
from minite.learner.worker import LearnerWorker
from minite.ports import LOOPBACK, free_port
from minite.sampler import make_engine
from minite.sampler.engine import Request, SamplingParams, update_weights
from tests.tolerances import STRICT_GAP

RECIPES = Path(__file__).parents[1] / "recipes"
# The same sizes as a dense model without QK norm.
LLAMA = (
    "model.kind=llama", "model.num_experts=0", "model.experts_per_token=0", "model.moe_intermediate_size=0",
    "model.intermediate_size=96", "model.rope_theta=100000", "model.tie_word_embeddings=true",
    'precision.rules=[{match: "model.layers.**", use: w4a4}, {match: "**", use: bf16}]',
)  # fmt: skip
SIZES = ("model.num_layers=4", "model.hidden_size=64", "model.init_std=0.3", "warm_start.steps=0")
WIDE = ["model.hidden_size=1024", "model.num_heads=8", "model.head_dim=128", "model.moe_intermediate_size=256"]
WIDE += ["model.num_experts=16", "model.experts_per_token=4", "model.init_std=0.05"]


def gap(config: RunConfig) -> Tensor:
    """Learner minus sampler log-probs of 96 mixed requests, [loss tokens]. Weights are random."""
    plan = resolve_plan(config)
    worker = LearnerWorker(config, plan, 0, 1, LOOPBACK, free_port())
    try:
        exported = worker.export()
        assert exported is not None
        buckets, version = exported
        engine = make_engine(config, plan)
        update_weights(engine, buckets, version)
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
    return (logprob_T - batch.sampler_logprob_T)[batch.loss_mask_T]


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [
        ("w4a4_strict", []),
        ("bf16", []),
        ("w4a4_strict", ["sampler.temperature=0.7"]),
        ("w4a4_strict", ["algo.router_replay=false"]),  # each side routes by itself
    ],
    ids=["w4a4", "bf16", "temperature", "no replay"],
)
def test_learner_and_sampler_agree_to_the_last_bit(recipe: str, settings: list[str]) -> None:
    overrides = [*SIZES, "learner.device=cpu", "precision.alignment=strict", *settings]
    gap_N = gap(load_recipe(RECIPES / f"tiny_qwen3_moe_{recipe}_grpo.yaml", overrides))
    assert gap_N.numel() > 500
    assert float(gap_N.abs().max()) <= STRICT_GAP


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["w4a4", "w4a16", "w4a8", "bf16"])
@pytest.mark.parametrize("settings", [[], WIDE], ids=["tiny", "wide"])
def test_aligned_on_a_gpu_is_as_good(recipe: str, settings: list[str]) -> None:
    """Every kernel of the backend triton computes a row alone as in any batch, so that nothing is left to differ."""
    pytest.importorskip("triton", reason="the Triton backend needs the package triton")
    overrides = [*SIZES, "learner.device=cuda", "sampler.device=cuda", "precision.backend=triton", *settings]
    gap_N = gap(load_recipe(RECIPES / f"tiny_qwen3_moe_{recipe}_grpo.yaml", overrides))
    assert gap_N.numel() > 500
    assert float(gap_N.abs().max()) <= STRICT_GAP
