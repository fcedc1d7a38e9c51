"""The table of settings that `minite launch` reads, held against what it writes; the rest is refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from minite.config import load_recipe, resolve_plan
from minite.errors import UserError
from minite.launch import engine, files, reads, refuse
from minite.launch.slime_args import slime_arguments

RECIPES = Path(__file__).parents[2] / "recipes"
# Read by a check alone, which refuses all but what slime does.
CHECKED = {
    "data.kind", "data.reward", "data.tokenizer", "learner.data_parallel", "sampler.kind", "sampler.count",
    "sampler.transport", "driver.ahead", "driver.prometheus_port", "driver.wandb",
}  # fmt: skip
OTHER_KINDS = {"data.max_operand", "data.operations", "data.tasks", "data.questions"}  # of data.kind; slime's is jsonl


TINY = [
    "model.checkpoint=m", "warm_start.steps=0", "warm_start.wrong_frac=0", "data.kind=jsonl", "data.path=d.jsonl",
    "sampler.kind=sglang", "slime.gpus_per_node=1", "algo.max_resample=2", "algo.dual_clip=3.0",
]  # fmt: skip
OWN = ["slime.quantization=minite", "slime.eval_data=eval.jsonl"]


def load(*overrides, own=OWN):
    return load_recipe(RECIPES / "tiny_qwen3_moe_w4a4_grpo.yaml", [*TINY, *own, *overrides])


def prepare(config):
    return files.prepare(config, resolve_plan(config), Path("/o"), Path("/s"), None, "")


def another(value):
    if isinstance(value, bool):
        return not value
    if isinstance(value, int | float):
        return value * 2 + 1
    return "separate" if value == "colocated" else 1 if value is None else "x"


def fields_of(config):
    for section in ("data", "learner", "sampler", "algo", "driver"):
        for f in dataclasses.fields(getattr(config, section)):
            yield section, f.name


def with_value(config, section, name, value):
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **{name: value})})


def test_a_setting_changes_what_is_written_or_is_refused():
    config, plan = load(), resolve_plan(load())

    def written(config):
        return slime_arguments(config, plan), engine.engine_flags(config, plan)

    changing = set()
    for section, name in fields_of(config):
        changed = with_value(config, section, name, another(getattr(getattr(config, section), name)))
        if written(changed) != written(config):
            changing.add(f"{section}.{name}")
    said = {f"{section}.{name}" for section, name in fields_of(config) if reads.is_read(f"{section}.{name}", config)}
    assert said == changing | CHECKED | OTHER_KINDS and not changing & CHECKED


@pytest.mark.parametrize("path", sorted(CHECKED))
def test_what_only_a_check_reads_has_one_value(path):
    config = load()
    value = {"learner.data_parallel": 3, "sampler.count": 3, "driver.wandb": True}.get(
        path, 1 if path.startswith("driver") else "x"
    )
    with pytest.raises(UserError, match=path.partition(".")[2]):
        refuse.check(with_value(config, *path.split("."), value), resolve_plan(config), [])


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("learner.bad_gradient=stop", "learner.bad_gradient 'stop': remove it, or add -o learner.bad_gradient=skip"),
        ("data.bad_reward=stop", "-o data.bad_reward=skip"),
        ("driver.num_cpus=4", "-o driver.num_cpus=null"),
        ("algo.max_resample=0", "algo.max_resample 0 (slime samples until the batch is full)"),
        ("monitor.watch=[gap]", "monitor.watch is ('gap',), but minite launch needs []"),
        (
            "data.tokenizer=models/other",
            "data.tokenizer is 'models/other', but slime takes the one of model.checkpoint",
        ),
    ],
)
def test_what_launch_does_not_read_is_refused_in_one_line(override, told):
    config = load(override)
    with pytest.raises(UserError) as caught:
        prepare(config)
    message = str(caught.value)
    assert told in message and message.startswith(f"-o {override}: ") and "\n" not in message


def test_all_of_them_are_told_at_once():
    config = load("driver.retries=0", "learner.bad_gradient=stop")
    with pytest.raises(UserError, match="-o learner.bad_gradient=skip -o driver.retries=3"):
        prepare(config)


def test_evaluation_and_the_cache_are_read_only_where_slime_has_them():
    prepare(load("driver.eval_every=5"))
    config = load("driver.eval_every=5", own=["precision.alignment=off"])
    with pytest.raises(
        UserError, match=r"kv_tokens 16384 \(slime.memory_fraction.*eval_every 5 \(slime evaluates only"
    ):
        prepare(config)
