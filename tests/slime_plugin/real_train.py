"""A process of its own: GRPO by slime's real actor on a CPU, sampled by miniTE's engine from what slime would send.

    python real_train.py SLIME_DIR MEGATRON_DIR DIRECTORY STOP

Trains up to rollout STOP and saves; called again on the same directory, it resumes and goes on.

Real: slime's argument parser, model and optimizer set-up, actor (train_actor), loss, log; Megatron's DDP, distributed
optimizer and checkpoints; the plugin's hooks as minite launch names them. Not here: Ray, slime's rollout manager,
SGLang.
The reward is the share of even tokens in a response, which a random policy gets half right. Prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import stand_ins
import tiny_slime  # first: it makes slime importable
import torch
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.training.global_vars import set_args
from slime.backends.megatron_utils import actor as slime_actor
from slime.backends.megatron_utils import megatron_to_hf, model
from slime.backends.megatron_utils.update_weight.common import named_params_and_buffers
from slime.observability import train_metric_utils
from slime.observability.timer import Timer
from slime.utils import accelerator
from slime.utils.arguments import parse_args
from slime.utils.misc import load_function
from slime.utils.tensor_backper import TensorBackuper
from tiny_slime import RECIPES

from minite.backends.registry import get_backend
from minite.config import load_recipe, resolve_plan
from minite.launch import files, resume
from minite.learner.hf import initial_tensor
from minite.losses.advantage import group_advantage
from minite.models import get_model
from minite.models.hf_config import write_hf_config
from minite.sampler.embedded import EmbeddedEngine
from minite.sampler.engine import Request, SamplingParams, update_weights
from minite.sync.checkpoint import CheckpointWriter
from minite.sync.export import pack
from minite.sync.modelopt import quantization_config
from minite.sync.transport import package

SLIMES_OWN = megatron_to_hf.quantize_params
STEPS, PROMPTS, GROUP, NEW = 20, 8, 8, 12


def make_args(directory: Path) -> tuple[Any, Any, Any]:
    """(config, plan, slime's arguments) of a launch, parsed by slime."""
    overrides = [
        "sampler.kind=sglang", "sampler.count=1", "slime.gpus_per_node=1", f"model.checkpoint={directory}/bf16",
        f"slime.checkpoint={directory}/nvfp4", f"slime.save={directory}/save", "data.kind=jsonl",
        "data.path=none.jsonl",
        "warm_start.steps=0", "warm_start.wrong_frac=0", f"driver.steps={STEPS}", f"algo.prompts_per_step={PROMPTS}",
        f"algo.group_size={GROUP}", "learner.lr=2e-3", f"sampler.max_new_tokens={NEW}", "correction.calm=auto",
        "precision.alignment=off",
        "driver.tensorboard=false", "algo.max_resample=2", "driver.eval_temperature=0.0", "sampler.kv_tokens=262144",
        # Megatron's checkpoints want the Adam of Transformer Engine or Apex; torch's, here, counts its steps elsewhere.
        "slime.extra=[--make-vocab-size-divisible-by, '32', --no-save-optim, --no-load-optim]",
    ]  # fmt: skip
    config = load_recipe(RECIPES / "tiny_qwen3_moe_w4a4_grpo.yaml", overrides)
    plan = resolve_plan(config)
    hf = write_hf_config(config.model)
    if not directory.exists():
        directory.mkdir()
        resume.check_new(config)
        with CheckpointWriter(directory / "bf16") as writer:
            for name, shape in get_model(config.model.kind).hf_tensors(config.model).items():
                writer.add(name, initial_tensor(name, shape, config.model.init_std, 0).bfloat16())
            writer.write_json("config.json", hf)
        (directory / "nvfp4").mkdir()
        text = json.dumps({**hf, "quantization_config": quantization_config(plan)})
        (directory / "nvfp4/config.json").write_text(text)
        out = directory / "launch"
    else:
        out = directory / f"launch-after-{resume.find(config, plan).rollout}"
    launch = files.prepare(config, plan, out, Path("/slime"), None, "")
    files.write(launch, out)
    sys.argv = ["train.py", *launch.arguments]
    return config, plan, parse_args()


def start(args: Any) -> slime_actor.MegatronTrainRayActor:
    """slime's actor as its init makes it, without Ray, tokenizer and weight updater."""
    actor = object.__new__(slime_actor.MegatronTrainRayActor)
    actor.args, actor.role = args, "actor"
    actor.model, actor.optimizer, actor.opt_param_scheduler, loaded = model.initialize_model_and_optimizer(
        args, "actor"
    )
    actor.weights_backuper = TensorBackuper.create(
        lambda: named_params_and_buffers(args, actor.model, convert_to_global_name=True), single_tag=None
    )
    actor._active_model_tag = "actor"
    actor.weights_backuper.backup("actor")
    actor.rollout_data_postprocess = load_function(args.rollout_data_postprocess_path)
    actor.prof, actor.weight_updater = mock.Mock(), SimpleNamespace(pop_metrics=dict)
    actor.start = loaded + 1 if args.start_rollout_id is None else args.start_rollout_id  # as create_training_models
    Timer().start("train_wait")
    return actor


def send(actor: Any, engine: EmbeddedEngine, plan: Any, step: int) -> None:
    """slime's own conversion of the weights that its updater would read, packed for miniTE's engine."""
    with mock.patch.object(megatron_to_hf, "quantize_params", SLIMES_OWN):  # BF16, which pack quantizes
        named = [
            pair
            for name, tensor in actor.weights_backuper.get("actor").items()
            for pair in megatron_to_hf.convert_to_hf(actor.args, "qwen3_moe", name, tensor)
        ]
    buckets, version = package(pack(plan, named, get_backend("auto", device="cpu", strict=False)), step, plan.digest)
    update_weights(engine, buckets, version)


def roll_out(engine: EmbeddedEngine, step: int) -> dict[str, Any]:
    """A rollout in slime's form for one rank: two optimizer steps of two microbatches each."""
    generator = torch.Generator().manual_seed(step)
    prompts = [tuple(torch.randint(0, 32, (3,), generator=generator).tolist()) for _ in range(PROMPTS)]
    requests = [
        Request(f"{step}.{i}.{g}", prompt, SamplingParams(NEW, seed=10_000 * step + 100 * i + g))
        for i, prompt in enumerate(prompts)
        for g in range(GROUP)
    ]
    done = engine.generate(requests)
    reward_S = torch.tensor([sum(t % 2 == 0 for t in c.tokens) / len(c.tokens) for c in done])
    advantage_S = group_advantage(reward_S, torch.arange(PROMPTS).repeat_interleave(GROUP), True)
    masks = [torch.ones(len(c.tokens), dtype=torch.int) for c in done]
    quarter = len(done) // 4
    return {
        "tokens": [torch.tensor([*c.prompt_tokens, *c.tokens]) for c in done],
        "total_lengths": [len(c.prompt_tokens) + len(c.tokens) for c in done],
        "response_lengths": [len(c.tokens) for c in done],
        "loss_masks": masks,
        "rollout_mask_sums": [mask.sum() for mask in masks],
        "rollout_log_probs": [torch.tensor(c.logprobs, dtype=torch.float32) for c in done],
        "rewards": advantage_S.tolist(),
        "raw_reward": reward_S.tolist(),
        "rollout_routed_experts": [c.routed_experts.int() for c in done],
        "micro_batch_indices": [list(range(i * quarter, (i + 1) * quarter)) for i in range(4)],
        "num_microbatches": [2, 2],
        "global_batch_sizes": [len(done) // 2, len(done) // 2],
    }


def main() -> None:
    stop = int(sys.argv.pop(4))
    directory = Path(sys.argv.pop(3))
    config, plan, args = make_args(directory)
    tiny_slime.start()
    stand_ins.unpin_memory()
    os.environ["ENABLE_ROUTING_REPLAY"] = "1"  # slime's actor group sets it for the process
    accelerator.set_accelerator(stand_ins.cpu_accelerator())
    set_args(args)
    init_num_microbatches_calculator(0, None, args.global_batch_size, args.micro_batch_size, 1, False)
    load_function(args.custom_megatron_init_path)(args)
    actor = start(args)
    engine = EmbeddedEngine(config, plan, "cpu")
    logged: list[dict[str, float]] = []
    with mock.patch.object(train_metric_utils.logging_utils, "log", lambda _, values, step_key: logged.append(values)):
        for step in range(actor.start, stop):
            send(actor, engine, plan, step)
            rollout_data = roll_out(engine, step)
            Timer().seq_lens = rollout_data["total_lengths"]
            actor.train_actor(step, rollout_data)
    model.save(stop - 1, actor.model, actor.optimizer, actor.opt_param_scheduler)
    # slime's rollout manager writes this; its content plays no part here.
    (directory / "save/rollout").mkdir(exist_ok=True)
    (directory / f"save/rollout/global_dataset_state_dict_{stop - 1}.pt").touch()
    rollouts = [values for values in logged if "rollout/raw_reward" in values]
    steps = [values for values in logged if "train/loss" in values]
    print(json.dumps({"rollouts": rollouts, "steps": steps}))


if __name__ == "__main__":
    main()
