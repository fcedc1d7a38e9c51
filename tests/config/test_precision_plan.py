"""The plan: what rules decide, groups, digest, JSON, table, and the message of every contradiction."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

import pytest
from recipe_files import DENSE, MOE, SHIPPED, message, plan_of, rules, write

from minite.config import PrecisionPlan, load_recipe, resolve_plan
from minite.config.plan import make_plan, plan_digest

REST = '{match: "**", use: bf16}'


def test_default_is_bf16_everywhere_in_model_order(tmp_path):
    plan = plan_of(tmp_path, MOE)
    assert not any(entry.quantized for entry in plan)
    names = [entry.name for entry in plan]
    assert len(plan) == 3 * (4 + 1 + 4 * 3) + 1
    assert names[:5] == [f"model.layers.0.self_attn.{x}_proj" for x in "qkvo"] + ["model.layers.0.mlp.gate"]
    assert names[-1] == "lm_head"
    assert (plan["lm_head"].n, plan["lm_head"].k) == (32, 64)
    assert (plan[names[1]].n, plan[names[1]].k) == (32, 64)  # k_proj: 2 KV heads of 16
    assert plan.get("model.layers.9.mlp.gate") is None


def test_first_match_wins(tmp_path):
    plan = plan_of(
        tmp_path,
        MOE,
        rules(
            '{match: "model.layers.*.mlp.gate", use: bf16}',
            "{layers: [0, -1], use: w4a16}",
            '{match: "**.mlp.experts.*.*", use: w4a4}',
            '{match: "**", use: bf16}',
        ),
    )
    assert plan["model.layers.0.mlp.gate"].format == "bf16"
    assert plan["model.layers.0.mlp.experts.1.up_proj"].format == "w4a16"
    assert plan["model.layers.2.self_attn.o_proj"].format == "w4a16"
    assert plan["model.layers.1.mlp.experts.1.up_proj"].format == "w4a4"
    assert plan["model.layers.1.self_attn.o_proj"].format == "bf16"
    entry = plan["model.layers.1.mlp.experts.3.down_proj"]
    assert (entry.weight, entry.input, entry.dgrad, entry.wgrad) == ("nvfp4_1d", "nvfp4_row", "bf16", "bf16")
    assert entry.rule.endswith("r.yaml:22: rule 2 (match **.mlp.experts.*.* -> w4a4)")
    assert entry.token_share == 0.5 and plan["lm_head"].token_share == 1.0


def test_layer_one_is_not_layer_ten(tmp_path):
    plan = plan_of(tmp_path, DENSE.replace("num_layers: 3", "num_layers: 12"), rules("{layers: [1], use: w4a4}", REST))
    assert {entry.name.split(".")[2] for entry in plan if entry.quantized} == {"1"}


def test_match_and_layers_both_must_hold(tmp_path):
    plan = plan_of(tmp_path, MOE, rules('{match: "**.o_proj", layers: [0, -1], use: w4a4}', REST))
    assert [entry.name for entry in plan if entry.quantized] == [f"model.layers.{i}.self_attn.o_proj" for i in (0, 2)]
    assert plan["model.layers.2.self_attn.o_proj"].rule.endswith("rule 0 (match **.o_proj, layers [0, -1] -> w4a4)")


def test_rules_of_an_extended_file_keep_their_place(tmp_path):
    write(tmp_path, rules('{match: "**", use: bf16}'), "prec.yaml")
    plan = resolve_plan(load_recipe(write(tmp_path, "extends: [prec.yaml]\n" + MOE)))
    assert plan["lm_head"].rule.endswith("prec.yaml:6: rule 0 (match ** -> bf16)")
    plan = resolve_plan(load_recipe(write(tmp_path, MOE)))
    assert plan["lm_head"].rule == "the default: rule 0 (match ** -> bf16)"


@pytest.mark.parametrize("model", [MOE, DENSE], ids=["moe", "dense"])
def test_fusion_groups(tmp_path, model):
    plan = plan_of(tmp_path, model)
    group = plan["model.layers.1.self_attn.k_proj"].group
    assert group == "model.layers.1.self_attn.qkv_proj"
    assert [e.name.rpartition(".")[2] for e in plan.group_members(group)] == ["q_proj", "k_proj", "v_proj"]
    mlp = "model.layers.2.mlp" if model is DENSE else "model.layers.2.mlp.experts.3"
    assert plan[f"{mlp}.gate_proj"].group == plan[f"{mlp}.up_proj"].group == f"{mlp}.gate_up_proj"
    assert plan[f"{mlp}.down_proj"].group is None
    assert plan["lm_head"].group is None
    with pytest.raises(KeyError):
        plan.group_members("lm_head")


def test_digest_is_of_numbers_only(tmp_path):
    base = rules("{layers: [1], use: w4a4}", '{match: "**", use: bf16}').replace(
        "{layers: [1], use: w4a4}",
        '{match: "model.layers.1.mlp.gate", use: bf16}\n    - {layers: [1], use: w4a4}',
    )
    plan = plan_of(tmp_path, MOE, base)
    same = {
        "comment": base + "# comment\n",
        "renamed format": base.replace("w4a4", "other"),
        "unused format": base.replace("    w4a16:", "    more: {weight: mxfp8}\n    w4a16:"),
        "rules that decide alike": base.replace(
            '- {match: "**", use: bf16}', '- {layers: [0], use: bf16}\n    - {match: "**", use: bf16}'
        ),
    }
    for what, text in same.items():
        assert plan_of(tmp_path, MOE, text).digest == plan.digest, what
    assert plan_of(tmp_path, MOE + "seed: 9\n", base).digest == plan.digest
    unquantized = replace(plan.entries[0], group="another")  # layer 0 is BF16: nothing shares a scale
    assert plan_digest(replace(plan, entries=(unquantized, *plan.entries[1:]))) == plan.digest
    first = next(i for i, entry in enumerate(plan) if entry.quantized and entry.group)
    regrouped = (*plan.entries[:first], replace(plan.entries[first], group=None), *plan.entries[first + 1 :])
    assert plan_digest(replace(plan, entries=regrouped)) != plan.digest
    different = {
        "one more layer": base.replace("{layers: [1]", "{layers: [1, 0]").replace(
            "model.layers.1.mlp", "model.layers.*.mlp"
        ),
        "input": base.replace("input: nvfp4_row", "input: mxfp8"),
        "weight": base.replace("w4a4: {weight: nvfp4_1d", "w4a4: {weight: nvfp4_2d"),
        "dgrad": base.replace("nvfp4_row}", "nvfp4_row, dgrad: dequantized}"),
        "wgrad": base.replace("nvfp4_row}", "nvfp4_row, wgrad: dequantized}"),
        "alignment": base + "  alignment: strict\n",
        "kv_cache": base + "  alignment: off\n  kv_cache: fp8\n",
        "off": base + "  alignment: off\n",
        "lm_head_dtype": base + "  alignment: off\n  lm_head_dtype: bf16\n",
        "backend": base + "  backend: reference\n",
    }
    digests = {what: plan_of(tmp_path, MOE, text).digest for what, text in different.items()}
    assert len({plan.digest, *digests.values()}) == 1 + len(different), digests
    assert plan_of(tmp_path, MOE.replace("hidden_size: 64", "hidden_size: 128"), base).digest != plan.digest


CHANGED_MODEL = {
    "kind": "qwen3",
    "tie_word_embeddings": True,
    "dtype": "fp32",
    "num_heads": 2,
    "checkpoint": "elsewhere",
    "init_std": 0.5,
    "max_seq_len": 64,
}  # the others: the number plus one


def test_digest_covers_every_number_of_the_model(tmp_path):
    """Start and length bound aside, a setting of the model that is changed, is another policy."""
    config = load_recipe(write(tmp_path, MOE))
    plan = resolve_plan(config)
    for name, value in vars(config.model).items():
        new = CHANGED_MODEL[name] if name in CHANGED_MODEL else value + 1
        changed = replace(config.model, **{name: new})
        other = make_plan(
            plan.entries, changed, kv_cache="bf16", lm_head_dtype="fp32", alignment="aligned", backend="auto"
        )
        assert (other.digest == plan.digest) == (name in ("checkpoint", "init_std", "max_seq_len")), name
    for text in ("model.rope_theta=5e5", "model.rms_norm_eps=1e-5", "model.experts_per_token=3"):
        assert plan_of(tmp_path, MOE, "", [text]).digest != plan.digest


def test_json_round_trip_and_damage(tmp_path):
    plan = plan_of(
        tmp_path,
        MOE,
        rules("{layers: [1], use: bf16}", '{match: "**.experts.*.*", use: w4a4}', '{match: "**", use: bf16}'),
    )
    text = plan.to_json()
    assert PrecisionPlan.from_json(text) == plan
    data = json.loads(text)
    assert data["digest"] == plan.digest and len(data["modules"]) == len(plan) and len(data["rules"]) == 3
    assert data["modules"][7] == {**vars(plan.entries[7]), "rule": data["rules"].index(plan.entries[7].rule)}

    no_model = json.dumps({**data, "model": []})
    other = json.dumps({**data, "model": {**data["model"], "rope_theta": 5e5}})
    assert "its digest does not fit its content" in message(PrecisionPlan.from_json, other)
    data["modules"][7]["input"] = "bf16"
    assert "plan.json: its digest does not fit its content" in message(PrecisionPlan.from_json, json.dumps(data))
    for damaged in (
        text[:-40],
        "[]",
        "{}",
        text.replace('"rule": 0', '"rule": 9', 1),
        text.replace('"n"', '"m"', 1),
        no_model,
    ):
        assert message(PrecisionPlan.from_json, damaged, "D/plan.json").startswith("D/plan.json: not a precision plan")


def test_table_collapses_layers_and_experts(tmp_path):
    plan = plan_of(
        tmp_path,
        MOE,
        rules(
            '{match: "**.mlp.gate", use: bf16}',
            "{layers: [0, 2], use: bf16}",
            '{match: "**.experts.*.*", use: w4a4}',
            '{match: "**", use: bf16}',
        ),
    )
    table = plan.table()
    rows = {line.split()[0]: line for line in table.splitlines() if line.startswith(("model.", "lm_head"))}
    assert "model.layers.[0-2].self_attn.q_proj" in rows
    assert "model.layers.[0,2].mlp.experts.[0-3].up_proj" in rows
    quantized = rows["model.layers.1.mlp.experts.[0-3].up_proj"]
    assert quantized.split()[1:9] == ["4", "[32,", "64]", "w4a4", "nvfp4_1d", "nvfp4_row", "bf16", "bf16"]
    weights = 3 * (64 * 64 * 2 + 2 * 32 * 64 + 4 * 64 + 4 * 3 * 32 * 64) + 32 * 64
    active = 3 * (64 * 64 * 2 + 2 * 32 * 64 + 4 * 64 + 2 * 3 * 32 * 64) + 32 * 64
    share, flops, size = quantized.split()[9:]
    assert share == f"{100 * 4 * 32 * 64 / weights:.2f}%"
    assert flops == f"{100 * 2 * 32 * 64 / active:.2f}%"
    assert size == "0.5625"
    assert len(rows) == 5 + 3 + 3 + 1
    assert sum(int(row.split()[1]) for row in rows.values()) == len(plan)
    assert f"{100 * 3 * 2 * 32 * 64 / active:.1f}% of the GEMM FLOPs of a forward" in table
    assert plan.digest[:16] in table


@pytest.mark.parametrize(
    ("gradients", "products"), [("", 1), (", dgrad: nvfp4", 2), (", dgrad: nvfp4, wgrad: nvfp4", 3)]
)
def test_table_counts_the_products_of_the_backward_that_are_nvfp4(tmp_path, gradients, products):
    text = rules(
        '{match: "**.mlp.gate", use: bf16}', '{match: "**.experts.*.*", use: w4a4}', '{match: "**", use: bf16}'
    )
    table = plan_of(tmp_path, MOE, text.replace("nvfp4_row", f"nvfp4_row{gradients}", 1)).table()
    line = table.splitlines()[-1]
    forward, whole = (float(line.split(f"% of {what}")[0].split()[-1]) for what in ("the GEMM FLOPs", "those"))
    assert whole == pytest.approx(forward * products / 3, abs=0.1)


def test_table_of_the_large_moe_fits_a_screen_and_needs_no_torch():
    """How long the command takes is tested in tests/test_cli.py."""
    recipe = next(p for p in SHIPPED if p.name == "qwen3_30b_a3b_w4a4_grpo.yaml")
    code = (
        "import sys; from minite.config import load_recipe, resolve_plan\n"
        f"plan = resolve_plan(load_recipe({str(recipe)!r})); print(plan.table())\n"
        "assert 'torch' not in sys.modules and len(plan) == 18673"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert "model.layers.[1-46].mlp.experts.[0-127].gate_proj" in out
    assert len(out.splitlines()) < 24


def test_plan_obeys_only_the_config(tmp_path):
    """Equal configurations from different files give equal plans up to the places of their rules."""
    text = rules('{match: "**.experts.*.*", use: w4a4}', '{match: "**", use: bf16}')
    first = resolve_plan(load_recipe(write(tmp_path, MOE + text, "a.yaml")))
    second = resolve_plan(load_recipe(write(tmp_path, MOE + text, "b.yaml")))
    assert first.digest == second.digest and first != second
    blank = [replace(entry, rule="") for entry in first]
    assert blank == [replace(entry, rule="") for entry in second]
