"""Backend te: the plan as data for Transformer Engine. Nothing of Transformer Engine runs here."""

from __future__ import annotations

import fnmatch
from pathlib import Path

import pytest
import yaml

from minite.config import load_recipe, resolve_plan
from minite.errors import UserError
from minite.launch.te import megatron_module, precision_file

RECIPES = Path(__file__).parents[2] / "recipes"


def decided(content, module_path):
    """As megatron reads it: the first enabled matcher whose glob fits decides."""
    for matcher in content["matchers"].values():
        assert matcher["type"] == "glob" and matcher["enabled"] is True
        if fnmatch.fnmatch(module_path, matcher["pattern"]):
            return matcher["config"]
    raise AssertionError(module_path)


@pytest.mark.parametrize("recipe", ["qwen3_30b_a3b_w4a4_grpo", "qwen3_4b_w4a4_grpo"])
def test_every_linear_gets_what_the_plan_says(recipe):
    plan = resolve_plan(load_recipe(RECIPES / f"{recipe}.yaml", ["precision.backend=te"]))
    content = yaml.safe_load(yaml.safe_dump(precision_file(plan)))
    seen = set()
    for entry in plan:
        module = megatron_module(entry.name)
        if module is None:
            assert entry.name == "lm_head" or entry.name.endswith(".mlp.gate")
            continue
        seen.add(module)
        expected = "nvfp4" if entry.quantized else "bf16"
        for prefix in ("", "module.module."):
            assert decided(content, prefix + module) == expected, entry.name
    assert len(seen) == 4 * plan.model["num_layers"]
    assert decided(content, "decoder.final_layernorm") == "bf16"


def test_evaluation_has_no_recipe_of_its_own():
    content = precision_file(resolve_plan(load_recipe(RECIPES / "qwen3_4b_w4a4_grpo.yaml")))
    for config in content["configs"].values():
        assert set(config) == {"transformer_engine_config_type", "training_recipe"}


def test_gradients_of_ours_are_refused():
    plan = resolve_plan(load_recipe(RECIPES / "qwen3_4b_w4a4_grpo.yaml", ["precision.formats.w4a4.wgrad=nvfp4"]))
    with pytest.raises(UserError, match="format 'w4a4' has gradients in nvfp4, which backend te does not quantize"):
        precision_file(plan)
