"""One rank of several: the plugin's model in slime, cut over tensor-parallel or expert-parallel ranks.

    python real_ranks.py SLIME_DIR MEGATRON_DIR TENSOR_PARALLEL EXPERT_PARALLEL CHECKPOINT OUT

CHECKPOINT is a Hugging Face directory, which the first run makes. Writes into OUT.<rank>: log-probs by slime's
vocabulary-parallel code, and what slime would send of this rank's parameters after its own gathering.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tiny_slime  # first: it makes slime importable
import torch
from slime.backends.megatron_utils import megatron_to_hf
from slime.backends.megatron_utils.hf_to_megatron import load_hf_weights
from slime.backends.megatron_utils.update_weight.common import all_gather_param, named_params_and_buffers
from tiny_slime import log_probs, microbatch, recipe, slime_args, wrapped

from minite.learner.hf import initial_tensor
from minite.models import get_model
from minite.models.hf_config import write_hf_config
from minite.sync.checkpoint import CheckpointWriter
from minite.sync.export import FormatQuantizer
from slime_plugin import patches
from slime_plugin.export import QuantizeParams
from slime_plugin.model import build

LENGTHS = [(4, 9), (3, 5), (2, 13)]  # 36 tokens: slime pads to a multiple of the ranks


def main() -> None:
    tensor_parallel, expert_parallel = int(sys.argv[3]), int(sys.argv[4])
    checkpoint, out = Path(sys.argv[5]), sys.argv[6]
    tiny_slime.start(tensor_parallel, expert_parallel)
    sizes = [f"learner.tensor_parallel={tensor_parallel}", f"learner.expert_parallel={expert_parallel}"]
    args = slime_args(*sizes)
    config, plan = recipe(args)
    if not checkpoint.exists():
        with CheckpointWriter(checkpoint) as writer:
            for name, shape in get_model(config.model.kind).hf_tensors(config.model).items():
                writer.add(name, initial_tensor(name, shape, 0.1, 0).bfloat16())
            writer.write_json("config.json", write_hf_config(config.model))
    model = build(args)
    for parameter in model.parameters():  # as Megatron's get_model does for those that say nothing
        for name, value in (("tensor_model_parallel", False), ("partition_dim", -1), ("partition_stride", 1)):
            if not hasattr(parameter, name):
                setattr(parameter, name, value)
    load_hf_weights(args, [wrapped(model)], checkpoint)
    patches.replace_quantize_params(QuantizeParams(plan, FormatQuantizer()))
    sent = {}
    for name, parameter in named_params_and_buffers(args, [wrapped(model)]):
        full = all_gather_param(name, parameter)
        sent |= dict(megatron_to_hf.convert_to_hf(args, "qwen3_moe", name, full))
    values = torch.cat(log_probs(args, model, microbatch(LENGTHS)))
    rank = torch.distributed.get_rank()
    torch.save({"log_probs": values, "sent": {k: v.clone() for k, v in sent.items()}}, f"{out}.{rank}")


main()
