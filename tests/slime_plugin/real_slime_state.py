"""Checks of real_slime.py: weights from Hugging Face, to and from Megatron's checkpoints; Megatron's own reading."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import tiny_slime  # first: it makes slime importable
import yaml
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.strategies import torch as strategies
from megatron.core.extensions.transformer_engine import TEQuantizationParams
from megatron.core.quantization.quant_config import MatchContext, RecipeConfig
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from tiny_slime import DENSE, exported, random_weights, recipe, slime_args, wrapped

from minite.config import load_recipe, resolve_plan
from minite.launch import te
from minite.learner.checkpoint import write_parts
from minite.models.hf_config import write_hf_config
from minite.sync.checkpoint import CheckpointWriter
from minite.sync.verify import compare
from slime_plugin.model import build


def check_slime_starts_from_a_hugging_face_directory() -> None:
    for overrides in ((), DENSE):
        args = slime_args(*overrides)
        config, _ = recipe(args)
        if overrides:
            args.num_experts = None
        source, target = build(args), build(args)
        random_weights(source)
        random_weights(target, seed=1)
        with tempfile.TemporaryDirectory() as directory:
            path = Path(directory) / "hf"
            with CheckpointWriter(path) as writer:
                for name, tensor in exported(args, source, None).items():
                    writer.add(name, tensor)
                writer.write_json("config.json", write_hf_config(config.model))
            load_hf_weights(args, [wrapped(target)], path)
        assert compare(dict(target.named_parameters()), dict(source.named_parameters())) is None


class InProcess(strategies.TorchDistSaveShardedStrategy):
    """Megatron's torch_dist format without its writer, whose helper processes do not start from within this one."""

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        write_parts(sharded_state_dict, checkpoint_dir)


def check_megatron_saves_and_loads_every_parameter() -> None:
    args = slime_args()
    source, target = build(args), build(args)
    random_weights(source)
    random_weights(target, seed=1)
    with tempfile.TemporaryDirectory() as directory:
        dist_checkpointing.save(source.sharded_state_dict(), directory, InProcess("torch_dist", 1))
        target.load_state_dict(dist_checkpointing.load(target.sharded_state_dict(), directory))
    assert compare(dict(target.named_parameters()), dict(source.named_parameters())) is None


def check_megatron_reads_the_te_file_as_meant() -> None:
    plan = resolve_plan(load_recipe(tiny_slime.RECIPES / "qwen3_4b_w4a4_grpo.yaml"))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "te.yaml"
        path.write_text(yaml.safe_dump(te.precision_file(plan)))
        read = RecipeConfig.from_yaml_file(str(path))
    for entry in plan:
        if (module := te.megatron_module(entry.name)) is not None:
            found = read.match(MatchContext(f"module.module.{module}", 1))
            parsed = TEQuantizationParams.parse_from_config(found)
            assert parsed.evaluation_recipe is None  # that of training
            wanted = "nvfp4" if entry.quantized else None
            assert parsed.training_recipe.fp4_quantization_recipe == wanted, entry.name
            assert parsed.training_recipe.override_quantized_autocast
