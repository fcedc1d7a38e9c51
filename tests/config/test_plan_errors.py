"""The message of everything that rules and formats can get wrong."""

from __future__ import annotations

import pytest
from recipe_files import DENSE, MOE, message, one_format, plan_of, rules


def error(folder, precision: str, model: str = MOE, overrides=()) -> str:
    return message(plan_of, folder, model, precision, overrides)


ERRORS = {
    "nothing matches": (
        rules('{match: "model.layers.*.mlp.gate_prj", use: bf16}', '{match: "**", use: bf16}'),
        "r.yaml:20: rule 0 (match model.layers.*.mlp.gate_prj -> bf16) decides no module: nothing matches; "
        "nearest is 'model.layers.*.mlp.gate'",
    ),
    "gate is not gate_proj": (
        rules('{match: "**.mlp.gate_proj", use: w4a4}', '{match: "**", use: bf16}'),
        "rule 0 (match **.mlp.gate_proj -> w4a4) decides no module: nothing matches",
    ),
    "shadowed": (
        rules('{match: "**", use: bf16}', "{layers: [1], use: w4a4}"),
        "r.yaml:21: rule 1 (layers [1] -> w4a4) decides no module: all 17 it matches are decided above by ",
    ),
    "shadowed by": (
        rules('{match: "**", use: bf16}', "{layers: [1], use: w4a4}"),
        "r.yaml:20: rule 0 (match ** -> bf16); move it up or remove it",
    ),
    "empty layers": (
        rules("{layers: [], use: w4a4}", '{match: "**", use: bf16}'),
        "rule 0 (layers [] -> w4a4) decides no module: its list of layers is empty",
    ),
    "layer outside": (
        rules("{layers: [0, 3], use: w4a4}", '{match: "**", use: bf16}'),
        "r.yaml:20: rule 0 names layer 3, but the model has 3 layers; expected -3 to 2",
    ),
    "layer outside below": (
        rules("{layers: [-4], use: w4a4}", '{match: "**", use: bf16}'),
        "rule 0 names layer -4, but the model has 3 layers",
    ),
    "uncovered": (
        rules('{match: "**.mlp.**", use: bf16}'),
        "r.yaml:19: no rule covers 'model.layers.0.self_attn.q_proj' (13 modules: model.layers.*.self_attn.q_proj, "
        "model.layers.*.self_attn.k_proj, model.layers.*.self_attn.v_proj, model.layers.*.self_attn.o_proj, lm_head); "
        "add a rule for them",
    ),
    "no rules": ("precision: {rules: []}\n", "r.yaml:15: no rule covers 'model.layers.0.self_attn.q_proj' (52 modules"),
    "partial segment": (
        rules('{match: "**.q*", use: bf16}', '{match: "**", use: bf16}'),
        "r.yaml:20: rule 0: segment 'q*' of pattern '**.q*' is not a whole segment",
    ),
    "match and layers": (
        rules('{match: "lm_head", layers: [0, -1], use: bf16}', '{match: "**", use: bf16}'),
        "rule 0 (match lm_head, layers [0, -1] -> bf16) decides no module: nothing in these layers matches",
    ),
    "neither": (rules("{use: bf16}"), "r.yaml:20: rule 0 names no module; give it match, layers or both"),
    "unknown format": (
        rules('{match: "**", use: w4a5}'),
        "r.yaml:20: rule 0 uses unknown format 'w4a5'; nearest is 'w4a4'",
    ),
    "unknown operand": (
        "precision:\n  formats:\n    f:\n      weight: nvfp4_1\n",
        "r.yaml:18: precision.formats.f.weight is an unknown operand 'nvfp4_1'; nearest is 'nvfp4_1d'",
    ),
    "row scale for a weight": (
        "precision: {formats: {f: {weight: nvfp4_row}}}\n",
        "r.yaml:15: precision.formats.f.weight: operand 'nvfp4_row' (E2M1, 1x16 blocks, one outer scale per token) "
        "cannot be an operand of that role; expected one of bf16, nvfp4_1d, "
        "nvfp4_2d, nvfp4_1d_4o6, mxfp8, fp8_tensor, fp8_128x128",
    ),
    "2d input": (
        "precision: {formats: {f: {input: nvfp4_2d}}}\n",
        "precision.formats.f.input: operand 'nvfp4_2d'",
    ),
    "bf16 redefined": (
        "precision: {formats: {bf16: {weight: nvfp4_1d}}}\n",
        "r.yaml:15: format 'bf16' always exists and cannot be redefined; rename it",
    ),
    "nvfp4 bf16 input": (
        "precision: {formats: {f: {weight: nvfp4_1d, wgrad: nvfp4}}}\n",
        "precision.formats.f.wgrad is nvfp4, but its input is bf16, which is never quantized; remove wgrad",
    ),
    "dequantized bf16 weight": (
        "precision: {formats: {f: {input: mxfp8, dgrad: dequantized}}}\n",
        "precision.formats.f.dgrad is dequantized, but its weight is bf16, which is never quantized; remove dgrad",
    ),
    "dequantized bf16 input": (
        "precision: {formats: {f: {weight: nvfp4_1d, wgrad: dequantized}}}\n",
        "precision.formats.f.wgrad is dequantized, but its input is bf16",
    ),
    "mixed fusion group": (
        rules('{match: "**.k_proj", use: w4a4}', '{match: "**", use: bf16}'),
        "r.yaml:20: rule 0 (match **.k_proj -> w4a4) makes fusion group 'model.layers.0.self_attn.qkv_proj' mixed: "
        "'model.layers.0.self_attn.k_proj' has format 'w4a4', but 'model.layers.0.self_attn.q_proj' has 'bf16' by ",
    ),
    "mixed experts": (
        rules('{match: "**.experts.3.*", use: w4a4}', '{match: "**", use: bf16}'),
        "makes grouped GEMM 'model.layers.0.mlp.experts.gate_proj' mixed: 'model.layers.0.mlp.experts.3.gate_proj' has "
        "format 'w4a4', but 'model.layers.0.mlp.experts.0.gate_proj' has 'bf16'",
    ),
    "quantized router": (
        rules('{match: "model.layers.**", use: w4a4}', '{match: "**", use: bf16}'),
        "r.yaml:20: rule 0 (match model.layers.** -> w4a4) gives format 'w4a4' to the router "
        "'model.layers.0.mlp.gate', "
        'which is never quantized; put {match: "model.layers.*.mlp.gate", use: bf16} above it',
    ),
    "quantized lm_head": (
        rules('{match: "**.mlp.gate", use: bf16}', '{match: "**", use: w4a16}'),
        "gives format 'w4a16' to the lm_head 'lm_head', which is never quantized",
    ),
    "fused names nobody": (
        "precision: {fused: [[q_proj, k_proj, v_proj], [gate_prj, up_proj]]}\n",
        "r.yaml:15: precision.fused[1] ['gate_prj', 'up_proj'] groups no module: none is called 'gate_prj'; "
        "nearest is 'gate_proj'",
    ),
    "fused names a missing sibling": (
        "precision: {fused: [[q_proj, k_proj, vv_proj]]}\n",
        "precision.fused[0] ['q_proj', 'k_proj', 'vv_proj']: 'model.layers.0.self_attn.vv_proj' does not exist",
    ),
    "fused twice": (
        "precision: {fused: [[q_proj, k_proj, v_proj], [q_proj, o_proj]]}\n",
        "'model.layers.0.self_attn.q_proj' is already in group 'model.layers.0.self_attn.qkv_proj'",
    ),
    "fused alone": ("precision: {fused: [[q_proj]]}\n", "precision.fused[0] ['q_proj'] names fewer than two modules"),
    "fused less than the learner": (
        "precision: {fused: [[q_proj, k_proj, v_proj]]}\n",
        "precision.fused has no entry for ['gate_proj', 'up_proj'], which the learner holds in one weight; "
        "add [gate_proj, up_proj]",
    ),
    "tensor-wide and aligned": (
        "precision:\n  formats:\n    f: {weight: nvfp4_1d, input: nvfp4_tensor}\n  rules:\n"
        '    - {match: "**.o_proj", use: f}\n    - {match: "**", use: bf16}\n',
        "the default: precision.alignment is aligned, but format 'f' (",
    ),
    "fp8 cache and aligned": (
        "precision:\n  kv_cache: fp8\n  alignment: strict\n",
        "r.yaml:17: precision.alignment is strict, but precision.kv_cache is fp8 (",
    ),
    "bf16 logits and aligned": (
        "precision: {lm_head_dtype: bf16}\n",
        "but precision.lm_head_dtype is bf16 (",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(tmp_path, case):
    precision, expected = ERRORS[case]
    assert expected in error(tmp_path, precision)


def test_nvfp4_dgrad_sums_over_whole_blocks(tmp_path):
    odd, both = DENSE.replace("intermediate_size: 96", "intermediate_size: 40"), ("**.gate_proj", "**.up_proj")
    text = error(tmp_path, one_format("weight: nvfp4_1d, dgrad: nvfp4", *both), odd)
    assert "has N = 40, but operand 'dgrad: nvfp4' needs a multiple of 16 on each rank" in text
    plan = plan_of(tmp_path, odd, one_format("weight: nvfp4_1d, input: nvfp4_row, wgrad: nvfp4", *both))
    assert {entry.wgrad for entry in plan if entry.quantized} == {"nvfp4"}


def test_alignment_off_allows_what_alignment_forbids(tmp_path):
    for case in ("tensor-wide and aligned", "fp8 cache and aligned", "bf16 logits and aligned"):
        assert "alignment: off" in error(tmp_path, ERRORS[case][0])
        assert plan_of(tmp_path, MOE, ERRORS[case][0], ["precision.alignment=off"]).alignment == "off"


def test_aligned_experts_are_replayed(tmp_path):
    setting = "algo.router_replay=false"
    text = error(tmp_path, "", overrides=[setting])
    assert f"precision.alignment is aligned, but algo.router_replay is false (-o {setting})" in text
    for level in ("strict", "off"):  # strict: both sides compute the same router logits, so they choose alike
        plan_of(tmp_path, MOE, "", [setting, f"precision.alignment={level}"])
    plan_of(tmp_path, DENSE, "", [setting])


@pytest.mark.parametrize("setting", ["sampler.top_p=0.9", "sampler.top_k=20"])
def test_aligned_log_probs_are_of_the_whole_distribution(tmp_path, setting):
    """Truncated sampling renormalises over fewer tokens than the learner sees."""
    name, value = setting.split("=")
    for level in ("aligned", "strict"):
        text = error(tmp_path, "", overrides=[f"precision.alignment={level}", setting])
        assert f"precision.alignment is {level}, but {name} is {value} (-o {setting}): the sampler's log-probs" in text
    plan_of(tmp_path, MOE, "", ["precision.alignment=off", setting])


@pytest.mark.parametrize(
    ("operand", "size", "fits"),
    [("nvfp4_1d", 96, True), ("nvfp4_1d", 100, False), ("mxfp8", 96, True), ("mxfp8", 112, False)],
)
def test_k_must_divide_by_the_block(tmp_path, operand, size, fits):
    """down_proj has K = intermediate_size."""
    model = DENSE.replace("intermediate_size: 96", f"intermediate_size: {size}")
    text = one_format(f"weight: {operand}", "**.down_proj")
    if fits:
        assert plan_of(tmp_path, model, text)["model.layers.0.mlp.down_proj"].weight == operand
    else:
        got = error(tmp_path, text, model)
        multiple = {"nvfp4_1d": 16, "mxfp8": 32}[operand]
        assert f"module 'model.layers.0.mlp.down_proj' has K = {size}, but operand '{operand}' needs a " in got
        assert f"multiple of {multiple} on each rank" in got


def test_inputs_are_checked_as_weights_are(tmp_path):
    model = DENSE.replace("intermediate_size: 96", "intermediate_size: 112")
    text = one_format("weight: nvfp4_1d, input: mxfp8", "**.mlp.*")
    assert "has K = 112, but operand 'mxfp8'" in error(tmp_path, text, model)


def test_rows_must_divide_for_2d(tmp_path):
    model = DENSE.replace("intermediate_size: 96", "intermediate_size: 104")  # N of gate_proj, 6.5 blocks of 16
    text = one_format("weight: nvfp4_2d", "**.gate_proj", "**.up_proj")
    assert "module 'model.layers.0.mlp.gate_proj' has N = 104, but operand 'nvfp4_2d'" in error(tmp_path, text, model)
    plan_of(tmp_path, model, text.replace("nvfp4_2d", "nvfp4_1d"))  # 1D does not care


def test_shapes_are_checked_per_tensor_parallel_shard(tmp_path):
    """intermediate 96 over 2 ranks is 48: fine for blocks of 16, not of 32. Experts are never split over TP."""
    tp = ["learner.tensor_parallel=2"]
    plan_of(tmp_path, DENSE, one_format("weight: nvfp4_1d", "**.down_proj"), tp)
    mxfp8 = one_format("weight: mxfp8", "**.down_proj")
    plan_of(tmp_path, DENSE, mxfp8)
    assert "has K = 96 over 2 tensor-parallel ranks" in error(tmp_path, mxfp8, DENSE, tp)
    plan_of(tmp_path, MOE, mxfp8, tp)  # experts' K is 32, whole on every rank
    rows = one_format("weight: nvfp4_2d", "**.self_attn.*")
    text = message(plan_of, tmp_path, MOE, rows, [*tp, "model.head_dim=8"])  # q has 32 rows, k has 16
    assert "'model.layers.0.self_attn.k_proj' has N = 16 over 2 tensor-parallel ranks" in text
