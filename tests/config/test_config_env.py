"""Environment variables: where the cache lies, and what the plan makes of third parties' variables."""

from __future__ import annotations

from pathlib import Path

import pytest
from recipe_files import DENSE, message, write

from minite.config import env, load_recipe, resolve_plan


def plan_of(folder, formats: str, rules: str):
    text = DENSE + f"precision:\n  alignment: off\n  formats: {formats}\n  rules: {rules}\n"
    return resolve_plan(load_recipe(write(folder, text)))


def uniform(folder, fmt: str):
    return plan_of(folder, f"{{f: {{{fmt}}}}}", '[{match: "**.mlp.*", use: f}, {match: "**", use: bf16}]')


def test_cache_dir(monkeypatch, tmp_path):
    monkeypatch.setenv("MINITE_CACHE_DIR", str(tmp_path / "a"))
    assert env.cache_dir() == tmp_path / "a"
    monkeypatch.delenv("MINITE_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert env.cache_dir() == tmp_path / "b" / "minite"
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.setenv("HOME", "/home/x")
    assert env.cache_dir() == Path("/home/x/.cache/minite")


def test_nothing_quantized_needs_nothing(tmp_path):
    assert env.third_party_env(resolve_plan(load_recipe(write(tmp_path, DENSE)))) == {}
    assert env.third_party_env(uniform(tmp_path, "weight: mxfp8")) == {}


@pytest.mark.parametrize(
    ("fmt", "two_d_off", "by_row", "backward"),
    [
        ("weight: nvfp4_1d, input: nvfp4_row", "1", "1", "high_precision"),
        ("weight: nvfp4_2d, input: nvfp4_row", "0", "1", "high_precision"),
        ("weight: nvfp4_1d, input: nvfp4_tensor", "1", "0", "high_precision"),
        ("weight: nvfp4_1d, input: nvfp4_row, dgrad: dequantized, wgrad: dequantized", "1", "1", "dequantized"),
        ("weight: nvfp4_1d", "1", None, "high_precision"),
    ],
)
def test_variables_follow_the_plan(tmp_path, fmt, two_d_off, by_row, backward):
    got = env.third_party_env(uniform(tmp_path, fmt))
    assert got.pop("NVTE_NVFP4_DISABLE_2D_QUANTIZATION") == two_d_off
    assert got.pop("NVTE_NVFP4_ROW_SCALED_ACTIVATION", None) == by_row
    assert got.pop("SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION", None) == by_row
    assert got.pop("NVTE_BACKWARD_OVERRIDE") == backward
    assert got == {
        "NVTE_USE_FAST_MATH": "0",
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH": "1",
        "TRTLLM_DISABLE_FP4_QUANT_FAST_MATH": "1",
        "NVTE_NVFP4_DISABLE_RHT": "1",
        "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
        "NVTE_NVFP4_4OVER6": "none",
        "FLASHINFER_NVFP4_4OVER6": "0",
    }


@pytest.mark.parametrize(
    ("fmt", "te", "flashinfer"),
    [
        ("weight: nvfp4_1d_4o6", "weights", "0"),
        ("weight: nvfp4_1d, input: nvfp4_row_4o6", "activations", "1"),
        ("weight: nvfp4_1d_4o6, input: nvfp4_row_4o6", "all", "1"),
    ],
)
def test_four_over_six_is_asked_for_as_the_formats_have_it(tmp_path, fmt, te, flashinfer):
    got = env.third_party_env(uniform(tmp_path, fmt))
    assert (got["NVTE_NVFP4_4OVER6"], got["FLASHINFER_NVFP4_4OVER6"]) == (te, flashinfer)
    assert got["NVTE_NVFP4_4OVER6_E4M3_USE_256"] == "none" and got["FLASHINFER_NVFP4_4OVER6_E4M3_USE_256"] == "0"
    assert got["NVTE_NVFP4_4OVER6_ERR_MODE"] == got["FLASHINFER_NVFP4_4OVER6_ERR_MODE"] == "MSE"
    assert got.get("NVTE_NVFP4_ROW_SCALED_ACTIVATION") == (None if "input" not in fmt else "1")


def test_choices_made_once_per_process_cannot_be_mixed(tmp_path):
    rules = '[{match: "**.mlp.*", use: f}, {match: "**.self_attn.*", use: g}, {match: "**", use: bf16}]'
    for f, g, what in (
        ("weight: nvfp4_1d", "weight: nvfp4_2d", "one weight choice"),
        ("input: nvfp4_row", "input: nvfp4_tensor", "one input choice"),
        ("weight: nvfp4_1d", "weight: nvfp4_1d, dgrad: dequantized", "one backward choice"),
    ):
        plan = plan_of(tmp_path, f"{{f: {{{f}}}, g: {{{g}}}}}", rules)
        text = message(env.third_party_env, plan)
        assert f"Transformer Engine makes {what} per process" in text and "r.yaml:" in text
