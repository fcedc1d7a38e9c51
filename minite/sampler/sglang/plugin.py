"""The entry point that SGLang calls in each of its processes (group ``sglang.srt.plugins`` in setup.py).

SGLang only logs a plugin that fails. So what is registered here shows itself in the proof of every scheduler process,
and the engine insists on it (proof.py). Where no miniTE plan is in use, nothing changes.
"""

from __future__ import annotations

from typing import Any

import torch


def register() -> None:
    """Make the quantization method, the sampler and the proof known to SGLang."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from minite.sampler.sglang import draw, methods
    from minite.sampler.sglang.compat import compat
    from minite.sampler.sglang.names import METHOD

    compat().add_quantization(METHOD, methods.MiniteConfig)
    for target, hook in (
        ("sglang.srt.managers.scheduler.Scheduler.get_internal_state", add_proof),
        ("sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", draw.add_seeds),
        ("sglang.srt.models.qwen3_moe.Qwen3MoeSparseMoeBlock.__init__", widen_router),
    ):
        HookRegistry.register(target, hook, HookType.AFTER)
    HookRegistry.register("sglang.srt.layers.sampler.Sampler.forward", draw.draw, HookType.AROUND)
    if not torch.cuda.is_available():
        record = "sglang.srt.state_capturer.base.BaseHostCache.__init__"
        HookRegistry.register(record, make_expert_record, HookType.REPLACE)


def add_proof(answer: Any, scheduler: Any, *args: Any) -> None:
    """Hook after Scheduler.get_internal_state: what this process runs, from inside."""
    from minite.sampler.sglang import inside

    state = inside.current()
    if state is not None:
        answer.internal_state["minite"] = state.proof()


def widen_router(nothing: None, block: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after the constructor of an MoE block: its router, which SGLang never quantizes, gives FP32 logits."""
    from minite.sampler.sglang import inside, methods

    if inside.current() is not None:
        block.gate.quant_method = methods.RouterMethod()


def make_expert_record(
    self: Any, num_tokens: int, num_layers: int, topk_size: int, name: str, device: str = "cpu"
) -> None:
    """Without a GPU, instead of BaseHostCache's constructor: the same record of routed experts, not page-locked."""
    self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name
