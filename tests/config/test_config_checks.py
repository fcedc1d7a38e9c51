"""Every check of values and pairs of values: the message says where, what was got, and what to do."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from recipe_files import DENSE, MOE, message, write

from minite.config import load_recipe
from minite.config.checks import BOUNDS, CHOICES
from minite.config.schema import RunConfig

MISTAKES = [
    ("model.kind=qwen", "model.kind is 'qwen': expected one of qwen3, qwen3_moe, llama; nearest is 'qwen3'"),
    ("precision.alignment=strickt", "expected one of off, aligned, strict; nearest is 'strict'"),
    (
        "precision.backend=tritn",
        "precision.backend is 'tritn': expected one of auto, native, triton, cpu, reference, te",
    ),
    ("slime.quantization=foo", "slime.quantization is 'foo': expected one of modelopt, minite"),
    ("precision.kv_cache=fp4", "precision.kv_cache is 'fp4': expected one of bf16, fp8"),
    ("correction=triag", "correction.kind is 'triag': expected one of none, tis, icepop, triage; nearest is 'triage'"),
    ("driver.placement=apart", "driver.placement is 'apart': expected one of colocated, separate"),
    ("precision.formats.f.dgrad=fp8", "precision.formats.f.dgrad is 'fp8': expected one of bf16, dequantized, nvfp4"),
    ("algo.group_size=1", "algo.group_size is 1: expected at least 2, so that a group has something to compare"),
    ("driver.steps=0", "driver.steps is 0: expected at least 1"),
    ("driver.num_cpus=0", "driver.num_cpus is 0: expected at least 1"),
    ("sampler.temperature=0", "sampler.temperature is 0.0: expected more than 0"),
    ("sampler.top_p=0", "sampler.top_p is 0.0: expected more than 0 and at most 1"),
    ("learner.lr=-.1", "learner.lr is -0.1: expected 0 or more"),
    ("learner.lr=.nan", "learner.lr is nan: expected 0 or more"),
    ("learner.beta2=1", "learner.beta2 is 1.0: expected at least 0 and below 1"),
    ("algo.dual_clip=1", "algo.dual_clip is 1.0: expected more than 1"),
    ("driver.ahead=2", "driver.ahead is 2: expected 0 or 1"),
    ("sampler.server=true", "sampler.server is True: only SGLang has it"),
    ("sampler.transport=model_dtype", "sampler.transport is 'model_dtype': only SGLang has it"),
    ("correction.calm_decay=1.5", "correction.calm_decay is 1.5: expected between 0 and 1"),
    ("model.num_kv_heads=3", "model.num_heads is 4: expected a multiple of num_kv_heads 3"),
    ("model.head_dim=15", "model.head_dim is 15: expected an even number"),
    ("model.num_experts=0", "model.num_experts is 0: kind qwen3_moe needs it; set it to at least 1"),
    ("model.intermediate_size=8", "model.intermediate_size is 8: kind qwen3_moe does not use it; remove it"),
    ("model.experts_per_token=1", "model.experts_per_token is 1: expected at least 2"),
    ("model.experts_per_token=5", "model.experts_per_token is 5: expected at most num_experts 4"),
    ("data.chat_template=true", "data.chat_template is True: tokenizer chars has none; remove it or set data.tok"),
    ("data=reasoning_gym", "data.tasks is {}: kind reasoning_gym needs tasks"),
    ("data.tasks.gcd.max_value=9", "only kind reasoning_gym has tasks; remove them or set the kind"),
    ("data=jsonl", "data.path is None: kind jsonl needs a file; set data.path"),
    ("data.path=x.jsonl", "data.path is 'x.jsonl': kind arithmetic makes its own questions"),
    ("data.operations=['+','/']", "data.operations is ('+', '/'): expected some of + - *"),
    ("data.operations=[]", "data.operations is (): expected some of + - *"),
    ("learner.tensor_parallel=3", "learner.tensor_parallel is 3: does not divide num_heads 4; 2 would"),
    ("learner.tensor_parallel=4", "learner.tensor_parallel is 4: does not divide num_kv_heads 2; 2 would"),
    ("model.vocab_size=33 learner.tensor_parallel=2", "is 2: does not divide vocab_size 33; 1 would"),
    ("learner.expert_parallel=3", "learner.expert_parallel is 3: does not divide num_experts 4"),
    (
        "learner.expert_parallel=4 learner.data_parallel=2",
        "learner.expert_parallel is 4: does not divide data_parallel 2; leave one of them at 1",
    ),
    (
        "algo.minibatches=3",
        "algo.minibatches is 3: a minibatch would hold 85.3 responses, which group_size 8 does not divide; "
        "expected a divisor of algo.prompts_per_step 32",
    ),
    (
        "algo.prompts_per_step=1 algo.group_size=3 learner.data_parallel=2",
        "algo.prompts_per_step is 1: a minibatch holds 3 responses, which 2 data-parallel ranks do not divide",
    ),
    (
        "algo.prompts_per_step=1 algo.group_size=3 learner.expert_parallel=2",
        "a minibatch holds 3 responses, which 2 data-parallel ranks do not divide",
    ),
    (
        "sampler.max_new_tokens=128",
        "sampler.max_new_tokens is 128: leaves no room for a prompt in model.max_seq_len 128",
    ),
    ("sampler.kv_tokens=16", "sampler.kv_tokens is 16: cannot hold one response of sampler.max_new_tokens 16"),
    ("learner.min_lr=1", "learner.min_lr is 1.0: expected at most learner.lr 1e-06"),
    ("learner.warmup_steps=101", "learner.warmup_steps is 101: the run makes only 100 optimizer steps"),
    ("correction.ratio_low=1.5", "correction.ratio_low is 1.5: expected 0 < ratio_low <= 1 <= ratio_high"),
    ("correction.calm=quiet", "correction.calm is 'quiet': expected a number [nats] or auto"),
    ("correction.calm=-1", "correction.calm is -1.0: expected 0 or more [nats]"),
    ("correction.calm=0.5", "correction.limit_negative is 0.5: expected more than correction.calm 0.5"),
    ("correction.limit_positive=0.4", "correction.limit_positive is 0.4: expected at least limit_negative 0.5"),
    ("driver.ahead=1", "driver.ahead is 1: a rollout ahead needs samplers of their own"),
]


@pytest.mark.parametrize(("overrides", "expected"), MISTAKES, ids=[m[0].replace(" ", ",") for m in MISTAKES])
def test_mistakes(tmp_path, overrides, expected):
    recipe = write(tmp_path, MOE)
    load_recipe(recipe)  # the recipe itself is fine
    assert expected in message(load_recipe, recipe, overrides.split())


def test_dense_model_takes_no_expert_settings(tmp_path):
    recipe = write(tmp_path, DENSE)
    load_recipe(recipe)
    assert "kind qwen3 does not use it" in message(load_recipe, recipe, ["model.num_experts=4"])
    assert "kind qwen3 needs it" in message(load_recipe, recipe, ["model.intermediate_size=0"])
    text = message(load_recipe, recipe, ["learner.expert_parallel=2"])
    assert "model kind qwen3 has no experts; expected 1" in text


def test_messages_name_the_place(tmp_path):
    recipe = write(tmp_path, MOE + "algo:\n  prompts_per_step: 6\n  minibatches: 4\n")
    assert "r.yaml:17: algo.minibatches is 4" in message(load_recipe, recipe)
    text = message(load_recipe, recipe, ["algo.minibatches=2", "sampler.max_new_tokens=500"])
    assert text.startswith("-o sampler.max_new_tokens=500: sampler.max_new_tokens is 500")
    assert "r.yaml:12)" in text  # where the limit stands
    assert message(load_recipe, recipe, ["algo.minibatches=2", "driver.ahead=1"]).startswith("-o driver.ahead=1: ")
    assert message(load_recipe, recipe, ["algo.minibatches=2", "learner.warmup_steps=201"]).startswith("-o learner.w")
    kv = message(load_recipe, write(tmp_path, MOE + "model:\n"))  # a section written twice
    assert "key 'model' is written twice" in kv


def test_what_is_allowed_at_the_edges(tmp_path):
    recipe = write(tmp_path, MOE)
    for text in (
        "sampler.max_new_tokens=127",
        "sampler.kv_tokens=17",
        "sampler.top_p=1",
        "sampler.temperature=0.1 driver.eval_temperature=0",
        "algo.prompts_per_step=1 algo.group_size=2 learner.expert_parallel=2",
        "learner.tensor_parallel=2",
        "learner.expert_parallel=2 learner.data_parallel=4",
        "driver.ahead=1 driver.placement=separate",
        "learner.warmup_steps=100",
        "learner.min_lr=1e-6",
        "correction.calm=0",
        "correction=none correction.calm=0.7",
        "correction.segment_risk=3",
        "warm_start.steps=0 data.heldout=0",
    ):
        load_recipe(recipe, text.split())


def _settings() -> dict[str, object]:
    """Dotted path -> type hint of every leaf of the schema."""
    found: dict[str, object] = {}
    for section, cls in typing.get_type_hints(RunConfig).items():
        if dataclasses.is_dataclass(cls):
            found |= {f"{section}.{name}": hint for name, hint in typing.get_type_hints(cls).items()}
        else:
            found[section] = cls
    return found


def test_every_number_has_a_bound_and_every_table_row_a_setting():
    bounded = {path for _, _, paths in BOUNDS for path in paths.split()}
    numbers = {p for p, hint in _settings().items() if {int, float} & ({hint} | set(typing.get_args(hint)))}
    checked_otherwise = {"correction.calm", "correction.ratio_low", "correction.ratio_high"}  # check_correction
    assert bounded | checked_otherwise == numbers
    assert set(CHOICES) <= set(_settings())
