"""Reading recipes: extends, overrides, bare words, types, and every message a mistake gets."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
from recipe_files import DENSE, MOE, message, rules, write

from minite.config import config_from_dict, config_to_dict, load_recipe
from minite.config.schema import CorrectionConfig, RunConfig


def test_defaults_come_from_the_schema_and_the_name_from_the_file(tmp_path):
    config = load_recipe(write(tmp_path, MOE, "my_run.yaml"))
    assert config.name == "my_run"
    assert config.correction == CorrectionConfig()
    assert config.model.hidden_size == 64
    assert load_recipe(write(tmp_path, MOE + "name: other\n")).name == "other"


def test_extends_merges_left_to_right_under_the_file(tmp_path):
    write(tmp_path, "algo: {group_size: 2, minibatches: 4}\nseed: 1\n", "recipes/base/a.yaml")
    write(tmp_path, "algo: {group_size: 4}\n", "recipes/base/b.yaml")
    write(tmp_path, MOE, "recipes/local.yaml")
    recipe = write(
        tmp_path, "extends: [base/a.yaml, base/b.yaml, local.yaml]\nalgo: {clip_low: 0.1}\n", "recipes/r.yaml"
    )
    config = load_recipe(recipe)
    assert (config.algo.group_size, config.algo.minibatches, config.algo.clip_low, config.seed) == (4, 4, 0.1, 1)
    assert config.where("algo.minibatches").endswith("recipes/base/a.yaml:1")
    assert config.where("algo.group_size").endswith("recipes/base/b.yaml:1")
    assert config.where("algo.clip_low").endswith("recipes/r.yaml:2")
    assert config.where("algo.clip_high") == "the default"


def test_extends_finds_the_recipes_folder_above_and_the_shipped_recipes(tmp_path):
    write(tmp_path, MOE, "recipes/base/m.yaml")
    deep = write(tmp_path, "extends: [base/m.yaml]\n", "recipes/mine/deep/r.yaml")
    assert load_recipe(deep).model.hidden_size == 64
    outside = write(tmp_path, "extends: [base/tiny_qwen3_moe.yaml]\n", "elsewhere/r.yaml")
    assert load_recipe(outside).model.kind == "qwen3_moe"


def test_extends_mistakes(tmp_path):
    write(tmp_path, MOE, "recipes/base/model.yaml")
    wrong = write(tmp_path, "# x\nextends:\n  - base/modle.yaml\n", "recipes/r.yaml")
    text = message(load_recipe, wrong)
    assert "r.yaml:3: 'extends' names 'base/modle.yaml', which does not exist; nearest is 'base/model.yaml'" in text
    write(tmp_path, "extends: [b.yaml]\n", "a.yaml")
    write(tmp_path, "extends: [a.yaml]\n", "b.yaml")
    text = message(load_recipe, tmp_path / "a.yaml")
    assert text.endswith("b.yaml:1: 'extends' runs in a circle: a.yaml -> b.yaml -> a.yaml")
    text = message(load_recipe, write(tmp_path, "extends: a.yaml\n"))
    assert "r.yaml:1: 'extends' is 'a.yaml', expected a list of recipe files" in text


def test_one_base_reached_twice_is_no_circle(tmp_path):
    write(tmp_path, MOE, "m.yaml")
    write(tmp_path, "extends: [m.yaml]\nseed: 3\n", "a.yaml")
    write(tmp_path, "extends: [m.yaml]\n", "b.yaml")
    assert load_recipe(write(tmp_path, "extends: [a.yaml, b.yaml]\n")).seed == 3


def test_missing_recipe_names_the_nearest(tmp_path):
    write(tmp_path, MOE, "tiny_w4a4.yaml")
    write(tmp_path, MOE, "other.yaml")
    text = message(load_recipe, tmp_path / "tiny_w4a5.yaml")
    assert "tiny_w4a5.yaml: no such recipe; in " in text and text.endswith("nearest is 'tiny_w4a4.yaml'")
    text = message(load_recipe, tmp_path / "nowhere" / "tiny_qwen3_moe_w4a4_grp.yaml")
    assert text.endswith("nearest is 'tiny_qwen3_moe_w4a4_grpo.yaml'")  # a shipped one
    assert message(load_recipe, tmp_path).startswith(f"{tmp_path}: a directory, expected a recipe file; in {tmp_path}")


def test_unreadable_recipe_and_recipe_that_is_no_mapping(tmp_path):
    text = message(load_recipe, write(tmp_path, "a: [1\nb: 2\n"))
    assert "r.yaml:2:2: not readable as YAML" in text
    text = message(load_recipe, write(tmp_path, "- 1\n- 2\n"))
    assert text.endswith("r.yaml:1: a recipe is a mapping of sections, got [1, 2]")
    path = tmp_path / "latin.yaml"
    path.write_bytes(b"name: \xff\n")
    assert "latin.yaml: cannot be read" in message(load_recipe, path)


def test_overrides_come_last(tmp_path):
    recipe = write(tmp_path, MOE + "algo: {group_size: 4}\n")
    config = load_recipe(recipe, ["algo.group_size=2", "learner.lr=1e-6", "precision.alignment=off", "data.path="])
    assert config.algo.group_size == 2
    assert config.learner.lr == 1e-6
    assert config.precision.alignment == "off"
    assert config.data.path is None
    rules = load_recipe(
        recipe, ['precision.rules=[{match: "**", use: bf16}, {layers: [0], use: bf16}]']
    ).precision.rules
    assert len(rules) == 2 and rules[1].layers == (0,)
    assert load_recipe(recipe, ["correction=none", "correction.window=4"]).correction == CorrectionConfig(
        kind="none", window=4
    )
    assert load_recipe(recipe, ["seed=1", "seed=2"]).seed == 2


def test_override_mistakes(tmp_path):
    recipe = write(tmp_path, MOE)
    assert message(load_recipe, recipe, ["algo.grop_size=2"]) == (
        "-o algo.grop_size=2: unknown key 'algo.grop_size'; nearest is 'group_size'"
    )
    assert message(load_recipe, recipe, ["algo.group_size"]).endswith("expected -o section.key=value")
    assert message(load_recipe, recipe, ["=3"]).endswith("expected -o section.key=value")
    text = message(load_recipe, recipe, ["algo.group_size=two"])
    assert text == "-o algo.group_size=two: 'algo.group_size' is str 'two', expected int"
    assert "-o algo=[1: not readable as YAML" in message(load_recipe, recipe, ["algo=[1"])


@pytest.mark.parametrize("section", ["sampler: sglang", "correction: icepop"])
def test_bare_word_sets_the_kind_and_keeps_the_rest(tmp_path, section):
    name, kind = section.split(": ")
    write(tmp_path, MOE + "correction: {window: 4}\n", "base.yaml")
    config = load_recipe(write(tmp_path, f"extends: [base.yaml]\n{section}\n"))
    assert getattr(config, name).kind == kind
    assert config.sampler.max_new_tokens == 16 and config.correction.window == 4
    assert getattr(load_recipe(tmp_path / "base.yaml", [f"{name}={kind}"]), name).kind == kind


def test_bare_word_for_a_section_without_kind(tmp_path):
    text = message(load_recipe, write(tmp_path, MOE + "learner: fast\n"))
    assert text.endswith("r.yaml:15: 'learner' is str 'fast', expected a section of LearnerConfig keys")


@pytest.mark.parametrize(
    ("yaml", "expected"),
    [
        ("algo:\n  grop_size: 4\n", "r.yaml:16: unknown key 'algo.grop_size'; nearest is 'group_size'"),
        ("lerner: {}\n", "r.yaml:15: unknown key 'lerner'; nearest is 'learner'"),
        ("group_size: 4\n", "r.yaml:15: unknown key 'group_size'; it belongs to section 'algo': algo.group_size"),
        ("sources: {}\n", "r.yaml:15: unknown key 'sources'; known: name, model, seed, "),
        ("learner: {temperature: 1}\n", "unknown key 'learner.temperature'; it belongs to section 'sampler'"),
        (
            "precision: {formats: {f: {wieght: bf16}}}\n",
            "unknown key 'precision.formats.f.wieght'; nearest is 'weight'",
        ),
        ("precision:\n  rules:\n    - {mach: x, use: bf16}\n", "r.yaml:17: unknown key 'precision.rules[0].mach'"),
        ("precision: {rules: [{match: x}]}\n", "r.yaml:15: 'precision.rules[0].use' is missing"),
        ("algo: {group_size: 4.0}\n", "r.yaml:15: 'algo.group_size' is float 4.0, expected int"),
        ("algo: {group_size: true}\n", "'algo.group_size' is bool True, expected int"),
        ("algo: {normalize_std: 1}\n", "'algo.normalize_std' is int 1, expected bool"),
        ("learner: {lr: fast}\n", "'learner.lr' is str 'fast', expected float"),
        ("learner: {min_lr: x}\n", "'learner.min_lr' is str 'x', expected float or null"),
        ("correction: {calm: [1]}\n", "'correction.calm' is a list [1], expected float or str"),
        ("data: {operations: +}\n", "'data.operations' is str '+', expected a list of str"),
        ("precision: {rules: {}}\n", "'precision.rules' is a section {}, expected a list of RuleConfig"),
        ("precision: {rules: [x]}\n", "'precision.rules[0]' is str 'x', expected a section of RuleConfig keys"),
        ("precision: {fused: [[a, 1]]}\n", "'precision.fused[0][1]' is int 1, expected str"),
        ("precision: {formats: []}\n", "'precision.formats' is a list [], expected a mapping of names"),
        ("learner:\n", "r.yaml:15: 'learner' is empty, expected a section of LearnerConfig keys"),
        ("name: 3\n", "'name' is int 3, expected str"),
    ],
)
def test_unknown_keys_and_wrong_types(tmp_path, yaml, expected):
    assert expected in message(load_recipe, write(tmp_path, MOE + yaml))


def test_missing_required_key(tmp_path):
    text = message(load_recipe, write(tmp_path, MOE.replace("  hidden_size: 64\n", "")))
    assert text.endswith("r.yaml:1: 'model.hidden_size' is missing; it has no default, so the recipe must set it")
    assert "'model' is missing" in message(load_recipe, write(tmp_path, "seed: 1\n"))


def test_numbers_keep_their_types(tmp_path):
    config = load_recipe(write(tmp_path, MOE + "learner: {lr: 1, min_lr: 0}\ncorrection: {calm: 0}\n"))
    assert type(config.learner.lr) is float and config.learner.min_lr == 0.0
    assert config.correction.calm == 0 and type(config.correction.calm) is float
    assert load_recipe(write(tmp_path, MOE + "correction: {calm: auto}\n")).correction.calm == "auto"


def test_sources_do_not_touch_equality(tmp_path):
    first = load_recipe(write(tmp_path, MOE + "seed: 3\n", "a/r.yaml"))
    second = load_recipe(write(tmp_path, MOE, "b/r.yaml"), ["seed=3"])
    assert first == second and first.sources != second.sources
    assert first != replace(first, seed=4)
    assert pickle.loads(pickle.dumps(first)).sources == first.sources
    assert "sources" not in repr(first)


@pytest.mark.parametrize("text", [MOE, DENSE], ids=["moe", "dense"])
def test_config_survives_json(tmp_path, text):
    extra = rules("{layers: [0, -1], use: w4a4}", '{match: "**", use: bf16}') + "correction: {calm: auto}\n"
    config = load_recipe(write(tmp_path, text + extra))
    data = json.loads(json.dumps(config_to_dict(config)))
    assert "sources" not in data
    again = config_from_dict(data, "config.json")
    assert again == config and isinstance(again, RunConfig)
    data["algo"]["group_size"] = 1
    assert message(config_from_dict, data, "config.json").startswith("config.json: algo.group_size is 1")
