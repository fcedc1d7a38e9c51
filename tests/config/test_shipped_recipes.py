"""Every recipe in recipes/: it loads, resolves, and says nothing that already holds."""

from __future__ import annotations

import pytest
from recipe_files import MOE, RUNNABLE, SHIPPED, write
from restated import restated_defaults

from minite.config import load_recipe, resolve_plan


def ids(path):
    return path.stem


@pytest.fixture(scope="module")
def plans():
    return {path.stem: resolve_plan(load_recipe(path)) for path in RUNNABLE}


def test_the_promised_recipes_exist():
    tiny = ("bf16", "w4a16", "w4a8", "w4a4", "w4a4_strict", "w4a4_unaligned", "w4a4_fp8kv")
    promised = {f"tiny_qwen3_moe_{p}_grpo" for p in tiny} | {"qwen3_4b_w4a4_grpo", "qwen3_30b_a3b_w4a4_grpo"}
    assert promised <= {path.stem for path in RUNNABLE}


@pytest.mark.parametrize("path", SHIPPED, ids=ids)
def test_restates_nothing(path):
    assert restated_defaults(path) == []


@pytest.mark.parametrize("path", RUNNABLE, ids=ids)
def test_is_short(path):
    assert len(path.read_text().splitlines()) <= 60


def test_digests_tell_precisions_apart(plans):
    tiny = {name: plan.digest for name, plan in plans.items() if name.startswith("tiny")}
    assert len(set(tiny.values())) == len(tiny)


def test_tiny_recipes_differ_in_precision_only():
    configs = {path.stem: load_recipe(path) for path in RUNNABLE if path.stem.startswith("tiny")}
    reference = configs["tiny_qwen3_moe_w4a4_grpo"]
    for name, config in configs.items():
        assert (config.model, config.algo, config.learner, config.data) == (
            reference.model,
            reference.algo,
            reference.learner,
            reference.data,
        ), name


@pytest.mark.parametrize(
    ("name", "operands"),
    [
        ("tiny_qwen3_moe_w4a16_grpo", {("bf16", "bf16"), ("nvfp4_1d", "bf16")}),
        ("tiny_qwen3_moe_w4a8_grpo", {("bf16", "bf16"), ("nvfp4_1d", "mxfp8")}),
        ("tiny_qwen3_moe_w4a4_grpo", {("bf16", "bf16"), ("nvfp4_1d", "nvfp4_row")}),
        ("tiny_qwen3_moe_w4a4_unaligned_grpo", {("bf16", "bf16"), ("nvfp4_1d", "nvfp4_tensor")}),
        ("tiny_qwen3_moe_bf16_grpo", {("bf16", "bf16")}),
    ],
)
def test_operands(plans, name, operands):
    assert {(entry.weight, entry.input) for entry in plans[name]} == operands


def test_alignment(plans):
    assert {name: plan.alignment for name, plan in plans.items() if plan.alignment != "aligned"} == {
        "tiny_qwen3_moe_w4a4_strict_grpo": "strict",
        "tiny_qwen3_moe_w4a4_unaligned_grpo": "off",
        "tiny_qwen3_moe_w4a4_fp8kv_grpo": "off",
    }
    assert plans["tiny_qwen3_moe_w4a4_fp8kv_grpo"].kv_cache == "fp8"


def test_first_and_last_layer_and_router_stay_in_bf16(plans):
    for name, plan in plans.items():
        last = max(int(e.name.split(".")[2]) for e in plan if e.name.startswith("model.layers."))
        for entry in plan:
            outer = entry.name.startswith(("model.layers.0.", f"model.layers.{last}."))
            if outer or entry.name.endswith(".mlp.gate") or entry.name == "lm_head":
                assert entry.format == "bf16", (name, entry.name)
        assert "bf16" in name or any(entry.quantized for entry in plan), name


def test_restated_defaults_are_found(tmp_path):
    write(tmp_path, MOE + "algo: {group_size: 4}\nlearner: {lr: 2e-6}\n", "base.yaml")
    recipe = write(
        tmp_path,
        "extends: [base.yaml]\nalgo:\n  group_size: 4\n  clip_low: 0.2\n  clip_high: 0.3\nlearner: {lr: 0.000001}\n"
        "correction: triage\nsampler: sglang\nprecision:\n  rules: [{use: bf16, match: '**'}]\n"
        "  formats: {f: {weight: nvfp4_1d, input: bf16}}\n  fused: [[q_proj, k_proj, v_proj], [gate_proj, up_proj]]\n",
    )
    found = [line.removeprefix(str(tmp_path)) for line in restated_defaults(recipe)]
    assert [line.split(": ")[1].split(";")[0] for line in found] == [
        f"'algo.group_size' restates {tmp_path}/base.yaml:15",
        "'algo.clip_low' restates its default 0.2",
        "'correction.kind' restates its default 'triage'",
        "'precision.rules' restates its default (RuleConfig(use='bf16', match='**', layers=None),)",
        "'precision.formats.f.input' restates its default 'bf16'",
        "'precision.fused' restates its default (('q_proj', 'k_proj', 'v_proj'), ('gate_proj', 'up_proj'))",
    ]
    assert found[0].startswith("/r.yaml:3: ")  # lr differs from the base though it equals the schema's default
