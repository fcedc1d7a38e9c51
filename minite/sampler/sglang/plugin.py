"""The entry point that SGLang calls in each of its processes (group ``sglang.srt.plugins`` in setup.py).

SGLang only logs a plugin that fails. So what is registered here shows itself in the proof of every scheduler process,
and the engine insists on it (proof.py). Where no miniTE plan is in use, nothing changes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from minite.models import FAMILIES


def register() -> None:
    """Make the quantization method known to SGLang, and hook what the plan decides but SGLang would do its own way."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    from minite.sampler.sglang import methods
    from minite.sampler.sglang.compat import compat
    from minite.sampler.sglang.names import METHOD

    compat().add_quantization(METHOD, methods.MiniteConfig)
    for target, kind, hook in hooks():
        HookRegistry.register(target, hook, kind)


def hooks() -> list[tuple[str, Any, Callable[..., Any]]]:
    """(SGLang's function, kind of hook, our function)."""
    from sglang.srt.plugins.hook_registry import HookType

    from minite.sampler.sglang import aligned, draw
    from minite.sampler.sglang.compat import compat

    native = "sglang.srt.layers.attention.torch_native_backend.TorchNativeAttnBackend"
    cpu = [
        ("sglang.srt.state_capturer.base.BaseHostCache.__init__", HookType.REPLACE, make_expert_record),
        (f"{native}._run_sdpa_forward_extend", HookType.AROUND, aligned.extend),
        (f"{native}._run_sdpa_forward_decode", HookType.AROUND, aligned.decode),
    ]
    kernels = compat().kernels
    gpu = [
        (f"{kernels}.extend_attention.extend_attention_fwd_unified", HookType.AROUND, aligned.extend_paged),
        (f"{kernels}.decode_attention.decode_attention_fwd", HookType.AROUND, aligned.decode_paged),
    ]
    everywhere = [
        ("model_executor.model_runner.ModelRunner.forward", HookType.AROUND, aligned.forward),
        ("layers.radix_attention.RadixAttention.forward", HookType.AROUND, aligned.attention),
        ("managers.scheduler.Scheduler.get_internal_state", HookType.AFTER, add_proof),
        ("sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch", HookType.AFTER, draw.add_seeds),
        ("layers.sampler.Sampler.forward", HookType.AROUND, draw.draw),
        ("models.qwen3_moe.Qwen3MoeSparseMoeBlock.__init__", HookType.AFTER, widen_router),
        ("layers.layernorm.RMSNorm.forward", HookType.AROUND, aligned.rms_norm),
        ("layers.rotary_embedding.base.RotaryEmbedding.forward", HookType.AROUND, aligned.rope),
        ("layers.activation.SiluAndMul.forward", HookType.AROUND, aligned.swiglu),
        ("layers.logits_processor.LogitsProcessor._compute_lm_head", HookType.AROUND, aligned.lm_head),
        ("models.utils.apply_qk_norm", HookType.AROUND, aligned.qk_norm),
        ("models.utils.enable_fused_set_kv_buffer", HookType.AROUND, aligned.no_fused_kv_write),
        *[
            (f"models.{kind}.{family.architecture}.load_weights", HookType.AROUND, receive_weights)
            for kind, family in FAMILIES.items()
        ],
    ]
    return [
        *((f"sglang.srt.{target}", kind, hook) for target, kind, hook in everywhere),
        *(gpu if torch.cuda.is_available() else cpu),
    ]


def missing_hooks() -> list[str]:
    """Hooks that SGLang did not apply, which it only logs."""
    from sglang.srt.plugins.hook_registry import HookRegistry

    return [target for target, _, _ in hooks() if target not in HookRegistry._patched]


def add_proof(answer: Any, scheduler: Any, *args: Any) -> None:
    """Hook after Scheduler.get_internal_state: what every process of the engine runs, each from inside.

    SGLang asks all of them and passes on the answer of the first, so the first has to carry what the others say.
    """
    from minite.sampler.sglang import inside

    state = inside.current()
    if state is not None:
        answer.internal_state["minite"] = state.ranks.everyones(state.proof() | {"missing_hooks": missing_hooks()})


def receive_weights(original: Callable[..., Any], model: Any, weights: Any, *args: Any, **kwargs: Any) -> Any:
    """Hook around a model's load_weights, which slime's updates and a process group's reach: they name no loader."""
    from minite.sampler.sglang import inside

    if inside.current() is None:
        return original(model, weights, *args, **kwargs)
    inside.load(model, weights)
    return None


def widen_router(nothing: None, block: Any, *args: Any, **kwargs: Any) -> None:
    """Hook after the constructor of an MoE block: its router, which SGLang never quantizes, gives FP32 logits."""
    from minite.sampler.sglang import inside, methods

    state = inside.current()
    if state is not None:
        block.gate.quant_method = methods.RouterMethod(state)


def make_expert_record(
    self: Any, num_tokens: int, num_layers: int, topk_size: int, name: str, device: str = "cpu"
) -> None:
    """Without a GPU, instead of BaseHostCache's constructor: the same record of routed experts, not page-locked."""
    self.buffer = torch.zeros((num_tokens, num_layers, topk_size), dtype=torch.int32)
    self.num_tokens, self.num_layers, self.topk_size, self.name = num_tokens, num_layers, topk_size, name
