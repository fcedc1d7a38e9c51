"""slime.quantization minite: what the engines start from, and how Ray's processes learn the method's name."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import yaml

from minite.config import load_recipe, resolve_plan
from minite.errors import UserError
from minite.launch import engine, files
from minite.sampler.sglang.names import METHOD
from slime_plugin import boot

RECIPE = Path(__file__).parents[2] / "recipes/qwen3_4b_w4a4_grpo.yaml"  # dense W4A4, aligned


def prepare(directory, *overrides):
    config = load_recipe(RECIPE, overrides)
    plan = resolve_plan(config)
    return files.prepare(config, plan, directory, Path("/slime"), None, ""), config, plan


def test_a_dense_plan_stays_aligned_and_the_engines_start_from_it(tmp_path):
    launch, config, plan = prepare(tmp_path / "out")
    assert plan.alignment == "aligned" and any(e.quantized and ".experts." not in e.name for e in plan)
    files.write(launch, tmp_path / "out")
    words = launch.arguments
    assert words[words.index("--hf-checkpoint") + 1] == str(tmp_path / "out/engine")
    assert "--sglang-enable-deterministic-inference" in words and "--sglang-quantization" not in words
    assert words.count("--sglang-max-running-requests") == 1
    engine.check_engine_directory(tmp_path / "out/engine", plan)
    job = yaml.safe_load(launch.files["runtime_env.yaml"])
    assert job["worker_process_setup_hook"] == "slime_plugin.boot.setup"

    hf = json.loads((tmp_path / "out/engine/config.json").read_text())
    other, _, _ = prepare(tmp_path / "other", "precision.alignment=off", "precision.lm_head_dtype=bf16")
    files.write(other, tmp_path / "other")
    hf["quantization_config"]["plan"] = str(tmp_path / "other/engine/plan.json")
    (tmp_path / "out/engine/config.json").write_text(json.dumps(hf))
    with pytest.raises(UserError, match="launch anew"):
        engine.check_engine_directory(tmp_path / "out/engine", plan)


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("slime.checkpoint=models/x", "slime.checkpoint"),
        ("driver.placement=separate", "driver.placement"),
    ],
)
def test_what_our_method_cannot_do_is_refused(tmp_path, override, told):
    with pytest.raises(UserError, match=told):
        prepare(tmp_path / "out", override)


def test_the_tokenizer_goes_along_and_the_weights_do_not(tmp_path):
    launch, _, _ = prepare(tmp_path / "out")
    files.write(launch, tmp_path / "out")
    bf16 = tmp_path / "bf16"
    bf16.mkdir()
    for name in ("config.json", "tokenizer.json", "model.safetensors", "model.safetensors.index.json"):
        (bf16 / name).write_text("{}")
    engine.copy_tokenizer(bf16, tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out/engine").iterdir()) == ["config.json", "plan.json", "tokenizer.json"]
    assert "quantization_config" in (tmp_path / "out/engine/config.json").read_text()
    with pytest.raises(UserError, match="model.checkpoint"):
        engine.copy_tokenizer(tmp_path / "absent", tmp_path / "out")


def test_sglangs_table_gets_the_name_when_it_is_imported(tmp_path, monkeypatch):
    package = tmp_path / "sglang/srt/layers/quantization"
    package.mkdir(parents=True)
    for folder in (tmp_path / "sglang", tmp_path / "sglang/srt", tmp_path / "sglang/srt/layers"):
        (folder / "__init__.py").write_text("")
    (package / "__init__.py").write_text("BASE_QUANTIZATION_METHODS = {}\nQUANTIZATION_METHODS = {'fp8': object}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    boot.setup()
    from sglang.srt.layers.quantization import BASE_QUANTIZATION_METHODS, QUANTIZATION_METHODS

    assert METHOD in BASE_QUANTIZATION_METHODS and list(QUANTIZATION_METHODS) == ["fp8", METHOD]
    assert QUANTIZATION_METHODS[METHOD].override_quantization_method({}, None) is None
    for name in [name for name in sys.modules if name.partition(".")[0] == "sglang"]:
        del sys.modules[name]
