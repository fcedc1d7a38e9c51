"""What `minite launch` writes, read by the real parsers of slime and Megatron."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkout import in_slime

from minite.config import load_recipe, resolve_plan
from minite.launch import files
from minite.models.hf_config import write_hf_config
from minite.sync.modelopt import quantization_config

RECIPES = Path(__file__).parents[2] / "recipes"


def parsed(tmp_path, recipe, *overrides, more=()):
    """(config, plan, slime's namespace)."""
    base = load_recipe(RECIPES / recipe, overrides)
    directory = tmp_path / "hf"
    directory.mkdir()
    text = {**write_hf_config(base.model)}
    plan = resolve_plan(base)
    if any(entry.quantized for entry in plan):
        text["quantization_config"] = quantization_config(plan)
    (directory / "config.json").write_text(json.dumps(text))
    places = [f"model.checkpoint={directory}", f"slime.checkpoint={directory}", f"slime.save={tmp_path}/save"]
    config = load_recipe(RECIPES / recipe, [*overrides, *places])
    launch = files.prepare(config, plan, tmp_path / "out", Path("/slime"), None, "")
    files.write(launch, tmp_path / "out")
    out = in_slime("parse_arguments.py", *launch.arguments, *more)
    return config, plan, json.loads(out.splitlines()[-1])


@pytest.mark.parametrize(
    ("recipe", "alignment"),
    [
        ("qwen3_30b_a3b_w4a4_grpo", "aligned"),
        ("qwen3_30b_a3b_w4a4_all_grpo", "off"),
        ("qwen3_4b_w4a4_grpo", "off"),
        ("qwen3_4b_bf16_grpo", "aligned"),
    ],
)
def test_the_real_parser_takes_every_argument(tmp_path, recipe, alignment):
    overrides = [f"precision.alignment={alignment}", "algo.kl_coef=0.001", "learner.min_lr=1e-7"]
    config, plan, got = parsed(tmp_path, f"{recipe}.yaml", *overrides)
    m, a, x = config.model, config.algo, config.learner
    assert got["minite"]["plan_digest"] == plan.digest and got["minite"]["recipe"]["name"] == config.name
    assert (got["num_layers"], got["hidden_size"], got["kv_channels"]) == (m.num_layers, m.hidden_size, m.head_dim)
    assert got["num_experts"] == (m.num_experts or None)
    assert got["untie_embeddings_and_output_weights"] is not m.tie_word_embeddings
    assert got["qk_layernorm"] is True and got["swiglu"] is True and got["add_bias_linear"] is False
    assert got["normalization"] == "RMSNorm" and got["layernorm_epsilon"] == m.rms_norm_eps
    assert got["lr"] == x.lr and got["min_lr"] == x.min_lr and got["lr_decay_style"] == "linear"
    assert got["adam_beta2"] == x.beta2 and got["clip_grad"] == x.clip_grad and got["weight_decay"] == x.weight_decay
    assert got["global_batch_size"] == a.prompts_per_step * a.group_size // a.minibatches
    assert (got["eps_clip"], got["eps_clip_high"], got["eps_clip_c"]) == (a.clip_low, a.clip_high, a.dual_clip)
    assert got["use_kl_loss"] is True and got["kl_loss_coef"] == 0.001
    assert got["calculate_per_token_loss"] is True and got["use_tis"] is True and got["get_mismatch_metrics"] is True
    assert got["colocate"] is True and got["offload_train"] is True and got["rollout_num_gpus"] == 8
    assert got["expert_model_parallel_size"] == x.expert_parallel and got["tensor_model_parallel_size"] == 1
    assert got["use_routing_replay"] is (m.num_experts > 0)
    assert got["train_env_vars"].get("NVTE_USE_FAST_MATH") == ("0" if any(e.quantized for e in plan) else None)
    experts = any(".experts." in e.name and e.quantized for e in plan)
    assert got["sglang_moe_runner_backend"] == ("flashinfer_trtllm_routed" if experts else None)
    assert got["bf16"] is True and got["fp4"] is None and got["fp8"] is None
    assert got["sglang_mem_fraction_static"] == config.slime.memory_fraction
    assert got["sglang_kv_cache_dtype"] == "auto" and got["sglang_enable_fp32_lm_head"] is True
    assert got["load"] == got["ref_load"] == config.model.checkpoint  # nothing is saved yet


def test_a_word_that_no_parser_knows_is_found(tmp_path):
    with pytest.raises(AssertionError, match="no parser knows.*--mispelt"):
        parsed(tmp_path, "qwen3_4b_bf16_grpo.yaml", more=["--mispelt", "1"])
