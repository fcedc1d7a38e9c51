"""`minite launch`: what it writes, what it refuses, what it resumes from. slime itself is not needed here."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
import yaml

from minite import cli
from minite.config import config_from_dict, load_recipe, resolve_plan
from minite.errors import UserError
from minite.launch import files, refuse, resume
from minite.launch.slime_args import slime_arguments, words
from minite.models.hf_config import write_hf_config
from minite.sync.modelopt import quantization_config

MOE = str(Path(__file__).parents[2] / "recipes/qwen3_30b_a3b_w4a4_grpo.yaml")
DENSE = str(Path(__file__).parents[2] / "recipes/qwen3_4b_w4a4_grpo.yaml")


# What SGLang's own linears allow a plan that quantizes dense inputs.
OFF = ["precision.alignment=off", "slime.quantization=modelopt"]


def load(*overrides, recipe=DENSE):
    config = load_recipe(recipe, [*OFF, *overrides] if recipe == DENSE else overrides)
    return config, resolve_plan(config)


def refusal(call, *arguments):
    with pytest.raises(UserError) as caught:
        call(*arguments)
    message = str(caught.value)
    assert "\n" not in message
    return message


def checkpoint(directory, config, **changes):
    """A directory with the config.json that minite convert would write, changed."""
    quantization = {**quantization_config(resolve_plan(config)), **changes}
    directory.mkdir()
    text = json.dumps({**write_hf_config(config.model), "quantization_config": quantization})
    (directory / "config.json").write_text(text)
    return directory


def test_values_reach_slime_under_its_names():
    config, plan = load(
        "learner.lr=2.5e-7", "algo.kl_coef=0.01", "learner.min_lr=1e-8", "seed=7", "algo.normalize_std=false",
        "slime.extra=[--use-wandb, --wandb-project, x]", recipe=MOE,
    )  # fmt: skip
    flags = slime_arguments(config, plan)
    assert flags["--lr"] == 2.5e-7 and flags["--seed"] == flags["--rollout-seed"] == 7
    assert flags["--kl-loss-coef"] == 0.01 and flags["--kl-loss-type"] == "k3"
    assert flags["--lr-decay-style"] == "linear" and flags["--lr-decay-iters"] == 2 * 1000
    assert flags["--disable-grpo-std-normalization"] is True
    assert flags["--num-experts"] == 128 and flags["--use-rollout-routing-replay"] is True
    assert "--sequence-parallel" not in flags and "--rollout-top-k" not in flags
    assert words({"--a": 1e-7, "--b": True, "--c": ("x", "y")}) == ["--a", "1e-07", "--b", "--c", "x", "y"]


def test_a_dense_model_has_no_word_of_experts():
    flags = slime_arguments(*load())
    assert not [flag for flag in flags if "moe" in flag or "expert" in flag and "parallel" not in flag]
    assert "--untie-embeddings-and-output-weights" not in flags and "--use-rollout-routing-replay" not in flags


def test_files_carry_the_recipe_and_split_the_environment(tmp_path):
    config, plan = load()
    launch = files.prepare(config, plan, tmp_path / "out", Path("/slime"), Path("/megatron"), "http://ray")
    files.write(launch, tmp_path / "out")
    read = {p.name: p.read_text() for p in (tmp_path / "out").iterdir()}
    sent = yaml.safe_load(read["config.yaml"])["minite"]
    assert config_from_dict(sent["recipe"], "config.yaml") == config
    assert sent["plan_digest"] == plan.digest == json.loads(read["plan.json"])["digest"]
    env = yaml.safe_load(read["runtime_env.yaml"])["env_vars"]
    assert env["PYTHONPATH"].startswith("/slime:/megatron:")
    train_env = json.loads(launch.arguments[launch.arguments.index("--train-env-vars") + 1])
    assert train_env and all(name.startswith("NVTE_") for name in train_env)
    assert env["SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION"] == "1" and not train_env.keys() & env.keys()
    assert shlex.split(read["command.sh"].split("exec ")[1].replace("\\\n", "")) == launch.command
    assert refusal(files.write, launch, tmp_path / "out").startswith("--out")


@pytest.mark.parametrize("path", sorted(Path(MOE).parent.glob("qwen3_*.yaml")), ids=lambda path: path.stem)
def test_a_shipped_recipe_launches_as_it_is(path):
    config = load_recipe(path)
    launch = files.prepare(config, resolve_plan(config), Path("/o"), Path("/s"), None, "")
    assert ("engine/plan.json" in launch.files) == (config.slime.quantization == "minite")


REFUSED = [
    (["sampler.kind=embedded"], "sampler.kind is 'embedded', but minite launch needs sglang"),
    (["model.checkpoint=null"], "model.checkpoint: not set"),
    (["driver.placement=separate", "driver.ahead=1"], "driver.ahead is 1"),
    (["correction.unhealthy=skip"], "correction.unhealthy is 'skip', but minite launch needs warn or stop"),
    (["precision.alignment=strict"], "precision.alignment is 'strict'"),
    (["model.rope_theta=1000000.7"], "model.rope_theta is 1000000.7, but Megatron's --rotary-base"),
    (["warm_start.steps=5"], "warm_start.steps is 5"),
    (["learner.tensor_parallel=2"], "= 16 processes, but slime starts one on each of 8 GPUs"),
    (["sampler.count=4"], "= 4 GPUs, but colocated engines take all 8; set sampler.count: 8"),
    (["slime.extra=[--sglang-kv-cache-dtype, fp8_e4m3]"], "slime.extra has --sglang-kv-cache-dtype"),
    (["slime.extra=[--te-precision-config-file=x.yaml]"], "it could give evaluation another recipe than training"),
    (["slime.extra=[--sglang-quantization, fp8]"], "slime.extra has --sglang-quantization"),
    (["precision.formats.w4a4.input=mxfp8"], "no ModelOpt NVFP4 layout"),
    (["precision.backend=te", "precision.formats.w4a4.input=nvfp4_row_4o6"], "Transformer Engine's NVFP4 recipe has"),
    (
        ["precision.backend=te", "precision.formats.w4a4.dgrad=dequantized"],
        "has dgrad dequantized and wgrad bf16; use one",
    ),
]


@pytest.mark.parametrize(("overrides", "expected"), REFUSED, ids=lambda x: x if isinstance(x, str) else x[-1])
def test_what_slime_cannot_do_is_refused(overrides, expected, tmp_path):
    config, plan = load(*overrides)
    assert expected in refusal(files.prepare, config, plan, tmp_path / "o", Path("/s"), None, "")


def test_an_fp8_kv_cache_beside_an_aligned_plan_is_refused():
    assert "precision.kv_cache is fp8" in refusal(load, "precision.alignment=aligned", "precision.kv_cache=fp8")


def test_dense_inputs_scaled_by_token_are_refused_where_sglang_cannot(tmp_path):
    config, plan = load("precision.alignment=aligned")
    message = refusal(files.prepare, config, plan, tmp_path / "o", Path("/s"), None, "")
    assert "model.layers.1.self_attn.q_proj" in message and "set precision.alignment: off" in message


def test_every_flag_of_the_recipe_is_refused_in_extra():
    config, plan = load(recipe=DENSE)
    decided = slime_arguments(config, plan)
    for flag in decided:
        config = load_recipe(DENSE, [*OFF, f"slime.extra=[--fine, '{flag}']"])
        assert f"slime.extra has {flag}" in refusal(refuse.check, config, plan, decided)


def test_the_checkpoint_must_hold_the_plan(tmp_path):
    base, plan = load()
    refuse.check_checkpoint(checkpoint(tmp_path / "right", base), plan)
    ignored = quantization_config(plan)["ignore"]
    for name, change, expected in (
        ("method", {"quant_method": "modelopt_fp4"}, "quant_method is 'modelopt_fp4', the plan needs 'modelopt'"),
        ("algo", {"quant_algo": "W4A16_NVFP4"}, "quant_algo is 'W4A16_NVFP4'"),
        ("less", {"ignore": ignored[:-1]}, f"ignore lacks {ignored[-1]!r}"),
        ("more", {"ignore": [*ignored, "x"]}, "ignore has 'x', the plan has not"),
    ):
        message = refusal(refuse.check_checkpoint, checkpoint(tmp_path / name, base, **change), plan)
        assert expected in message and "minite convert" in message
    assert "is not readable" in refusal(refuse.check_checkpoint, tmp_path / "none", plan)
    bf16 = tmp_path / "bf16"
    bf16.mkdir()
    (bf16 / "config.json").write_text(json.dumps(write_hf_config(base.model)))
    assert "holds BF16, but the plan" in refusal(refuse.check_checkpoint, bf16, plan)


def saved_run(directory, digest, rollout=19, state_rollout=19):
    """What slime and the plugin leave behind."""
    (directory / f"iter_{rollout:07d}").mkdir(parents=True)
    (directory / resume.TRACKER).write_text(f"{rollout}\n")
    (directory / "rollout").mkdir()
    (directory / f"rollout/global_dataset_state_dict_{rollout}.pt").touch()
    (directory / "minite").mkdir()
    line = {"rollout": state_rollout, "plan_digest": digest, "calm": 0.1, "gap_abs_mean": 0.01}
    (directory / resume.STATE).write_text(json.dumps({**line, "calm": 9}) + "\n" + json.dumps(line) + "\n")


def test_resume_finds_what_belongs_together(tmp_path):
    config, plan = load(f"slime.save={tmp_path}/run")
    saved_run(tmp_path / "run", plan.digest)
    found = resume.find(config, plan)
    assert found.rollout == 19 and found.state["calm"] == 0.1  # the last line: a rollout may be trained on twice
    assert "add --resume" in refusal(resume.check_new, config)


def test_resume_refuses_what_does_not(tmp_path):
    config, plan = load(f"slime.save={tmp_path}/run")
    resume.check_new(config)
    assert "names no checkpoint" in refusal(resume.find, config, plan)
    saved_run(tmp_path / "run", "f" * 64)
    assert "was trained under plan ffffffffffff" in refusal(resume.find, config, plan)
    (tmp_path / "run/rollout/global_dataset_state_dict_19.pt").unlink()
    assert "its data state" in refusal(resume.find, config, plan)
    (tmp_path / "run/rollout/global_dataset_state_dict_19.pt").touch()
    (tmp_path / "run" / resume.STATE).write_text('{"rollout": 3}\n')
    assert "has no line for rollout 19; its last is 3" in refusal(resume.find, config, plan)


def test_the_command_writes_and_prints_and_starts_nothing_in_a_dry_run(tmp_path, capsys):
    (tmp_path / "train.py").touch()
    arguments = ["launch", DENSE, "--dry-run", "--out", str(tmp_path / "out"), "-o", f"slime.save={tmp_path}/run"]
    arguments += [word for override in OFF for word in ("-o", override)]
    assert cli.main([*arguments, "--slime-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "exec ray job submit" in shown and f"python3 {tmp_path}/train.py" in shown and "dry run" in shown
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "config.yaml", "plan.json", "runtime_env.yaml", "command.sh"
    }  # fmt: skip
    assert cli.main([*arguments, "--slime-dir", str(tmp_path / "none")]) == 2
    assert "holds no train.py" in capsys.readouterr().err
