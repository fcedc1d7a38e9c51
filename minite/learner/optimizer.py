"""Gradient buffers, megatron's distributed Adam (FP32 master weights), and one update."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedStateDict
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.optimizer import MegatronOptimizer, OptimizerConfig, get_megatron_optimizer
from torch import Tensor

from minite.config.schema import LearnerConfig
from minite.learner.model import PolicyModel

# Of a gradient longer than this, the ranks' sum of squares may overflow FP32: its norm would be infinite, and the clip
# would make zeros of it.
LONGEST = 1e17


def build(model: PolicyModel, config: LearnerConfig) -> tuple[DistributedDataParallel, MegatronOptimizer]:
    """Wrap the model for gradient reduction and make its optimizer, with state allocated and zero."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        overlap_grad_reduce=False,
        check_for_nan_in_grad=False,  # it would end the process; ``update`` skips the step instead
    )
    ddp = DistributedDataParallel(model.config, ddp_config, model)
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        min_lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        clip_grad=config.clip_grad,
        bf16=model.config.bf16,
        params_dtype=model.config.params_dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(optimizer_config, [ddp], use_gloo_process_groups=False)
    reset(optimizer)
    return ddp, optimizer


def _adam_states(optimizer: MegatronOptimizer) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    for part in optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            yield from ((p, part.optimizer.state[p]) for p in group["params"])


def reset(optimizer: MegatronOptimizer) -> None:
    """Zero moments and step count. Megatron cannot write or read a checkpoint of an Adam that has no state yet."""
    for p, state in _adam_states(optimizer):
        state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(p), torch.zeros_like(p)
    set_adam_step(optimizer, 0)


def adam_step(optimizer: MegatronOptimizer) -> int:
    """Updates since ``reset``, as Adam's bias correction counts them."""
    return max((int(state["step"]) for _, state in _adam_states(optimizer)), default=0)


def set_adam_step(optimizer: MegatronOptimizer, step: int) -> None:
    for _, state in _adam_states(optimizer):
        state["step"] = torch.tensor(float(step))


def sharded_states(optimizer: MegatronOptimizer, model: ShardedStateDict, loading: bool) -> dict[int, Any]:
    """Master weights and moments for megatron's dist_checkpointing, cut as the parameters in ``model`` are.

    That can be read under any parallel layout. It is gathered over the data-parallel ranks to the CPU: 12 bytes for
    every parameter that a rank has a part of. What else an optimizer holds, the recipe says at every update.
    """
    return {
        i: part.sharded_param_state_fully_reshardable(model, loading, metadata={})
        for i, part in enumerate(optimizer.chained_optimizers)
    }


def load_states(optimizer: MegatronOptimizer, states: dict[int, Any], step: int) -> None:
    """What ``sharded_states`` asked for; ``step`` counts the updates."""
    for _, state in _adam_states(optimizer):
        state.pop("step")  # torch's Adam has one per parameter, for which megatron looks in vain
    for i, part in enumerate(optimizer.chained_optimizers):
        part.load_parameter_state_from_fully_reshardable(states[i])
    set_adam_step(optimizer, step)


def update(ddp: DistributedDataParallel, optimizer: MegatronOptimizer, lr: float, weight_decay: float) -> float | None:
    """Reduce the accumulated gradients, clip, step. Returns the gradient norm before clipping.

    A gradient that is not sound anywhere leaves weights and optimizer as they were: None is returned.
    """
    finalize_model_grads([ddp])
    buffers = ddp.buffers + ddp.expert_parallel_buffers
    sound = torch.stack([_sound(buffer.grad_data) for buffer in buffers]).all().float()
    dist.all_reduce(sound, dist.ReduceOp.MIN)
    if not sound.item():
        return None
    for group in optimizer.param_groups:
        group["lr"] = lr
        group["weight_decay"] = weight_decay * group["wd_mult"]  # 0 for norms
    _, grad_norm, _ = optimizer.step()
    ddp.module.weights_changed()
    return float(grad_norm)


def _sound(gradient: Tensor) -> Tensor:
    """bool []: neither NaN nor Inf nor longer than LONGEST. One pass, no copy."""
    return torch.linalg.vector_norm(gradient, dtype=torch.float64) < LONGEST


def unsound(ddp: DistributedDataParallel) -> list[str]:
    """Parameters whose gradient made ``update`` skip, by megatron's names; collective, equal on all ranks."""
    names = [name for name, p in ddp.module.named_parameters() if not _sound(p.main_grad)]
    everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, names)
    return sorted({name for theirs in everyone for name in theirs})


def zero_grad(ddp: DistributedDataParallel, optimizer: MegatronOptimizer) -> None:
    ddp.zero_grad_buffer()
    optimizer.zero_grad()
