"""The functions that slime's training processes call. Their signatures are slime's: the table is in README.md."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch

from minite.backends.registry import get_backend
from minite.errors import UserError
from minite.launch.engine import check_engine_directory
from minite.launch.refuse import check_checkpoint
from minite.losses.triage_state import TriageState
from slime_plugin import loss, patches, state
from slime_plugin.context import context
from slime_plugin.export import QuantizeParams
from slime_plugin.rollout import Responses, weigh

logger = logging.getLogger(__name__)

# A gap that grows by more than this factor over a restart is told: something came back different.
RESUME_JUMP = 3.0

_triage = TriageState()  # of this process; equal on all ranks
_last_rollout: int | None = None


def init(args: Any) -> None:
    """--custom-megatron-init-path: check what was launched, then patch. Before the model and the updater are made."""
    found = context(args)
    check_router(args)
    own = found.config.slime.quantization == "minite"
    (check_engine_directory if own else check_checkpoint)(Path(args.hf_checkpoint), found.plan)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # The file formats' own backend is enough for te: its codes are made by the definition.
    backend = get_backend("auto" if found.plan.backend == "te" else found.plan.backend, device=device, strict=False)
    patches.replace_quantize_params(QuantizeParams(found.plan, backend, disk_names=not own))
    if own:
        patches.prove_after_updates(found.plan, backend.name)
    else:
        patches.reprocess_after_updates(found.plan)
    logger.info("miniTE: plan %s, backend %s", found.plan.digest[:12], backend.name)


def check_router(args: Any) -> None:
    """UserError where the router of SGLang would drop the wish for routed experts, which slime misses a rollout later.

    The public sglang-router sends on only the fields that it knows; the build in slime's image sends on all of them.
    """
    if not args.use_rollout_routing_replay or args.sglang_router_ip is not None:  # the address of a router of the user
        return
    import sglang_router

    version = sglang_router.__version__
    if "slime" not in version:
        raise UserError(
            f"sglang_router is {version}, expected slime's own build (slime's docker/Dockerfile installs it): this one "
            "drops return_routed_experts from every request; install slime's, or launch with "
            "-o algo.router_replay=false -o precision.alignment=off"
        )


def before_log_prob(args: Any, model: list[torch.nn.Module], store_prefix: str) -> None:
    """--custom-megatron-before-log-prob-hook-path: slime has swapped weights (actor, reference) behind torch's back."""
    forget_quantized(model)


def before_train_step(
    args: Any, rollout_id: int, step_id: int, model: list[torch.nn.Module], optimizer: Any, opt_param_scheduler: Any
) -> None:
    """--custom-megatron-before-train-step-hook-path: so has the optimizer, in the step before."""
    forget_quantized(model)


def forget_quantized(model: list[torch.nn.Module]) -> None:
    """Every quantized weight of the model is made anew at its next use."""
    for chunk in model:
        for module in chunk.modules():
            if hasattr(module, "matmul"):
                module.matmul.cache.invalidate()


def postprocess(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """--rollout-data-postprocess-path: gap and weights of the rollout. Metrics go out as slime's rollout/gap/..."""
    from megatron.core import parallel_state as mpu

    if not mpu.is_pipeline_last_stage():
        return  # the log-probs are there
    if mpu.get_context_parallel_world_size() > 1:
        raise UserError("--context-parallel-size: TRIAGE needs whole responses on a rank; set it to 1")
    found = context(args)
    before = _restore(args, rollout_id)
    rank = mpu.get_data_parallel_rank()
    weighed = weigh(rollout_data, found.config.correction, _triage, rank, _gather)
    loss.BOOK.write(rollout_data["rollout_log_probs"], weighed.weights)
    rollout_data.update({name: [value] for name, value in weighed.metrics.items()})
    gap = weighed.metrics["gap/abs_mean"]
    if rank == 0 and mpu.get_tensor_model_parallel_rank() == 0:
        state.record(args.save, rollout_id, found.plan.digest, _triage, gap)
        _tell(before, gap, weighed.unhealthy, weighed.metrics["correction/dropped_frac"])
    if weighed.unhealthy and found.config.correction.unhealthy == "stop":
        raise UserError(
            f"rollout {rollout_id}: correction would drop {weighed.metrics['correction/dropped_frac']:.1%} of the loss "
            f"tokens, more than correction.max_dropped_frac {found.config.correction.max_dropped_frac:.1%}; see gap/*"
        )


def _restore(args: Any, rollout_id: int) -> dict[str, Any] | None:
    """The state of the rollout before, when this process starts in the middle of a run."""
    global _last_rollout
    fresh = _last_rollout is None
    _last_rollout = rollout_id
    return state.restore(args.load, rollout_id - 1, _triage) if fresh and rollout_id > 0 else None


def _tell(before: dict[str, Any] | None, gap: float, unhealthy: bool, dropped: float) -> None:
    if before is not None:
        was = before["gap_abs_mean"]
        say = logger.warning if gap > RESUME_JUMP * was else logger.info
        say("miniTE: mean abs gap %.3g nats after the restart, %.3g before it", gap, was)
    if unhealthy:
        logger.warning("miniTE: the correction drops %.1f %% of the loss tokens", 100 * dropped)


def _gather(own: Responses) -> list[Responses]:
    from megatron.core import parallel_state as mpu

    gathered: list[Responses] = [[] for _ in range(mpu.get_data_parallel_world_size())]
    torch.distributed.all_gather_object(gathered, own, group=mpu.get_data_parallel_group_gloo())
    return gathered
