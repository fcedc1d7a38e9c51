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
MORE = ["algo.kl_coef=0.001", "learner.min_lr=1e-7", "data.path=prompts.jsonl"]
MODELOPT = ["precision.alignment=off", "slime.quantization=modelopt"]
CASES = {  # recipe -> overrides
    "qwen3_30b_a3b_w4a4_grpo": [],
    "qwen3_30b_a3b_w4a4_all_grpo": [*MODELOPT, "precision.kv_cache=fp8"],
    "qwen3_4b_w4a4_grpo": [*MODELOPT, "sampler.top_p=0.9", "slime.eval_data=eval.jsonl"],
    "qwen3_30b_a3b_w4a4_all_grpo minite": ["slime.checkpoint=null"],
    "qwen3_4b_bf16_grpo": ["learner.tensor_parallel=2", "learner.data_parallel=4", "slime.offload_optimizer=true"],
}


@pytest.fixture(scope="module")
def parsed(tmp_path_factory):
    """Case -> (config, plan, slime's namespace, words that no parser knew)."""
    folder = tmp_path_factory.mktemp("slime")
    inputs, words = {}, {}
    for name, overrides in CASES.items():
        directory = folder / name
        directory.mkdir()
        places = [f"model.checkpoint={directory}", f"slime.checkpoint={directory}", f"slime.save={directory}/save"]
        places.append(f"data.tokenizer={directory}")
        config = load_recipe(RECIPES / f"{name.split()[0]}.yaml", [*places, *overrides, *MORE])
        plan = resolve_plan(config)
        quantized = config.slime.quantization == "modelopt" and any(entry.quantized for entry in plan)
        extra = {"quantization_config": quantization_config(plan)} if quantized else {}
        (directory / "config.json").write_text(json.dumps({**write_hf_config(config.model), **extra}))
        launch = files.prepare(config, plan, directory / "out", Path("/slime"), None, "")
        files.write(launch, directory / "out")
        inputs[name], words[name] = (config, plan), launch.arguments
    words["misspelt"] = [*words["qwen3_4b_bf16_grpo"], "--mispelt", "1"]
    inputs["misspelt"] = inputs["qwen3_4b_bf16_grpo"]
    (folder / "cases.json").write_text(json.dumps(words))
    results = json.loads(in_slime("parse_arguments.py", str(folder / "cases.json")).splitlines()[-1])
    return {name: (*inputs[name], results[name]["args"], results[name]["unknown"]) for name in words}


@pytest.mark.parametrize("case", CASES)
def test_every_argument_is_known_and_arrives(parsed, case):
    config, plan, got, unknown = parsed[case]
    assert unknown == []
    m, a, x, s = config.model, config.algo, config.learner, config.sampler
    assert got["minite"]["plan_digest"] == plan.digest and got["minite"]["recipe"]["name"] == config.name
    expected = {
        "num_layers": m.num_layers, "hidden_size": m.hidden_size, "kv_channels": m.head_dim,
        "num_query_groups": m.num_kv_heads, "num_experts": m.num_experts or None, "qk_layernorm": True,
        "swiglu": True, "add_bias_linear": False, "normalization": "RMSNorm", "layernorm_epsilon": m.rms_norm_eps,
        "untie_embeddings_and_output_weights": not m.tie_word_embeddings, "rotary_base": int(m.rope_theta),
        "tensor_model_parallel_size": x.tensor_parallel, "sequence_parallel": x.tensor_parallel > 1,
        "expert_model_parallel_size": x.expert_parallel, "max_tokens_per_gpu": x.tokens_per_microbatch,
        "lr": x.lr, "min_lr": x.min_lr, "lr_decay_style": "linear", "adam_beta2": x.beta2, "clip_grad": x.clip_grad,
        "weight_decay": x.weight_decay, "recompute_granularity": "full", "bf16": True, "fp4": None, "fp8": None,
        "optimizer_cpu_offload": config.slime.offload_optimizer,
        "global_batch_size": a.prompts_per_step * a.group_size // a.minibatches, "eps_clip": a.clip_low,
        "eps_clip_high": a.clip_high, "eps_clip_c": a.dual_clip, "use_kl_loss": True, "kl_loss_coef": a.kl_coef,
        "calculate_per_token_loss": True, "use_tis": True, "get_mismatch_metrics": True, "colocate": True,
        "offload_train": True, "rollout_num_gpus": 8, "use_routing_replay": m.num_experts > 0,
        "rollout_temperature": s.temperature, "rollout_top_p": s.top_p, "apply_chat_template": True,
        "sglang_mem_fraction_static": config.slime.memory_fraction, "sglang_enable_fp32_lm_head": True,
        "sglang_kv_cache_dtype": "fp8_e4m3" if plan.kv_cache == "fp8" else "auto",
        "load": config.model.checkpoint, "ref_load": config.model.checkpoint,  # nothing is saved yet
    }  # fmt: skip
    assert {name: got[name] for name in expected} == expected


def test_precision_decides_engine_and_environment(parsed):
    for config, plan, got, _ in parsed.values():
        quantized = any(e.quantized for e in plan)
        assert got["train_env_vars"].get("NVTE_USE_FAST_MATH") == ("0" if quantized else None)
        experts = any(".experts." in e.name and e.quantized for e in plan)
        own = config.slime.quantization == "minite"
        runner = "triton" if own else "flashinfer_trtllm_routed" if experts else None
        assert got["sglang_moe_runner_backend"] == runner
        assert got["sglang_load_format"] == ("dummy" if own else None)
        assert got["sglang_enable_deterministic_inference"] == own  # seeds of requests


def test_evaluation_is_on_only_with_its_data(parsed):
    _, _, with_data, _ = parsed["qwen3_4b_w4a4_grpo"]
    assert with_data["eval_interval"] == 10 and with_data["eval_prompt_data"][0] == "heldout"
    assert parsed["qwen3_4b_bf16_grpo"][2]["eval_interval"] is None


def test_a_word_that_no_parser_knows_is_seen(parsed):
    assert parsed["misspelt"][3] == ["--mispelt"]
