"""`minite plan --memory`: the arithmetic by hand on a small model, and the figures that recipes quote."""

from __future__ import annotations

import pytest
from recipe_files import MOE, RUNNABLE, write

from minite import cli
from minite.config import load_recipe, resolve_plan
from minite.config.memory import (
    GIB,
    Parameters,
    engine_memory,
    learner_memory,
    rank_parameters,
)

# MOE: 3 layers, H 64, 4 heads and 2 KV heads of 16, vocabulary 32, 4 experts of 32, 2 per token.
ATTENTION = 64 * 64 + 2 * 32 * 64 + 64 * 64
NORMS = 2 * 64 + 2 * 16
EXPERT = 3 * 32 * 64


def load(tmp_path, *overrides, recipe=MOE):
    config = load_recipe(write(tmp_path, recipe), overrides)
    return config, resolve_plan(config)


def test_parameters_of_a_rank(tmp_path):
    whole = 3 * (ATTENTION + NORMS + 4 * 64) + 2 * 32 * 64 + 64
    config, _ = load(tmp_path)
    assert rank_parameters(config) == Parameters(whole, 3 * 4 * EXPERT)
    config, _ = load(tmp_path, "learner.tensor_parallel=2", "learner.expert_parallel=4")
    split = 3 * (ATTENTION // 2 + NORMS + 4 * 64) + 2 * 32 * 64 // 2 + 64  # norms and routers are on every rank
    assert rank_parameters(config) == Parameters(split, 3 * EXPERT)
    config, _ = load(tmp_path, "model.tie_word_embeddings=true")
    assert rank_parameters(config).common == whole - 32 * 64


def test_learner_bytes_by_hand(tmp_path):
    layout = ["learner.tensor_parallel=2", "learner.expert_parallel=2", "learner.data_parallel=4", "algo.group_size=8"]
    config, plan = load(tmp_path, *layout, "learner.tokens_per_microbatch=128")
    p = rank_parameters(config)
    got = learner_memory(config, plan, slime=False)
    assert got.weights == 2 * (p.common + p.experts) and got.gradients == 4 * (p.common + p.experts)
    # 8 ranks: 4 hold the same common parameters, 8 / 2 the same experts.
    assert got.optimizer == 12 * (p.common / 4 + p.experts / 4)
    assert got.logits == 3 * 4 * 128 * 32 and learner_memory(config, plan, slime=True).logits == got.logits / 2
    layer = 4 * 64 + 2 * (4 + 2) * 16 + 2 * (2 * 64 + 3 * 32)
    assert got.activations == 2 * 64 * 3 * layer and got.codes == 0
    config, plan = load(tmp_path, *layout, "learner.tokens_per_microbatch=128", "learner.recompute=true")
    assert learner_memory(config, plan, slime=False).activations == 2 * 64 * (3 * 64 + layer)
    config, plan = load(tmp_path, "slime.offload_optimizer=true")
    assert learner_memory(config, plan, slime=True).optimizer == 0 < learner_memory(config, plan, slime=False).optimizer


W4A4 = """
precision:
  formats:
    w4a4: {weight: nvfp4_1d, input: nvfp4_row}
  rules: [{layers: [0], use: bf16}, {match: "**.experts.**", use: w4a4}, {match: "**", use: bf16}]
"""


def test_quantized_weights_by_hand(tmp_path):
    config, plan = load(tmp_path, "learner.expert_parallel=2", recipe=MOE + W4A4)
    codes = 2 * 4 * EXPERT * 4.5 / 8  # two of three layers
    assert learner_memory(config, plan, slime=False).codes == codes / 2
    p = rank_parameters(config)
    engine = engine_memory(config, plan, 1, None)
    assert engine.weights == 2 * (p.common + 4 * EXPERT) + codes
    assert engine.kv_cache == config.sampler.kv_tokens * 3 * 2 * 2 * 16 * 2


def test_the_kv_cache_of_slime_is_what_the_fraction_leaves(tmp_path):
    config, plan = load(tmp_path, "slime.memory_fraction=0.5", "precision.kv_cache=fp8", "precision.alignment=off")
    engine = engine_memory(config, plan, 2, GIB / 64)
    token = 2 * 3 * 2 * 16 * (1 + 4 / 16) / 2
    assert engine.kv_cache == GIB / 128 - engine.weights and engine.total == GIB / 128
    assert engine.kv_tokens == int(engine.kv_cache // token) > 0
    assert engine_memory(config, plan, 1, 1000).kv_tokens == 0  # the weights alone do not fit


def summary(config, plan, gpu_gib):
    """One line for the head of a recipe."""
    slime = learner_memory(config, plan, slime=True)
    engine = engine_memory(config, plan, config.slime.gpus_per_engine, gpu_gib * GIB)
    parts = ", ".join(f"{name} {value / GIB:.1f}" for name, value in vars(slime).items())
    return (
        f"[GiB per GPU of {gpu_gib:g}] training {slime.total / GIB:.1f} = {parts}; rollout {engine.weights / GIB:.1f} "
        f"weights + {engine.kv_cache / GIB:.1f} KV cache of {engine.kv_tokens:,} tokens"
    )


LARGE = [path for path in RUNNABLE if "8 x B300" in path.read_text()]


@pytest.mark.parametrize("path", LARGE, ids=lambda path: path.stem)
def test_recipes_quote_what_is_computed_and_fit(path):
    assert len(LARGE) == 5
    config = load_recipe(path)
    plan = resolve_plan(config)
    comments = " ".join(line[2:] for line in path.read_text().splitlines() if line.startswith("# "))
    assert summary(config, plan, 268) in comments
    training = learner_memory(config, plan, slime=True).total
    assert training + 10 * GIB < 268 * GIB
    # One response of every request at once would need this many tokens; SGLang queues what does not fit.
    assert engine_memory(config, plan, 1, 268 * GIB).kv_tokens > config.sampler.max_new_tokens * 64


def test_the_command_prints_the_sums(capsys):
    path = next(p for p in LARGE if p.stem == "qwen3_4b_w4a4_grpo")
    assert cli.main(["plan", str(path), "--memory", "268"]) == 0
    shown = capsys.readouterr().out
    config = load_recipe(path)
    total = learner_memory(config, resolve_plan(config), slime=True).total / GIB
    line = next(line for line in shown.splitlines() if line.startswith("total"))
    assert line.split()[2] == f"{total:.1f}" and "8 learner ranks: tensor 1, expert 1, data 8" in shown
