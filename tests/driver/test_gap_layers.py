"""A fault planted in one operation of one engine: `minite gap --layers` names the operation and what differs in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minite.diagnostics.layerwise import LayerReport, compare
from minite.driver.gap.layers import watch_learner, watch_sampler
from minite.driver.gap.local import Pair, pair
from minite.driver.gap.subject import Subject, open_subject
from minite.layers import ops
from minite.sampler.embedded.kv_cache import KVCache
from tests.driver.tiny_run import recipe

# Strict, so that nothing differs but what is planted; weights wide enough that everything shows.
OVERRIDES = ("precision.alignment=strict", "model.init_std=0.3", "warm_start.steps=0", "sampler.max_new_tokens=6")


@pytest.fixture(scope="module")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    path = recipe(tmp_path_factory.mktemp("gap"))
    return open_subject(path, [*OVERRIDES, "algo.router_replay=false"], None, lambda line: None)


def examine(
    subject: Subject, before: Callable[[Pair], None], during: Callable[[Any], None], monkeypatch: Any
) -> LayerReport:
    """``before``: changes one side after the weight sync. ``during``: patches what the sampler alone calls."""
    with pair(subject.config, subject.plan) as engines:
        tie_two_experts(engines)
        engines.sync()
        before(engines)
        with monkeypatch.context() as patch:
            during(patch)
            batch, theirs = watch_sampler(engines, subject)
        ours = watch_learner(engines, subject, batch)
    return compare(ours, theirs, batch.cu_seqlens_S1)


def tie_two_experts(engines: Pair) -> None:
    """Experts 0 and 1 of layer 1 get one router row: every token is a tie there."""
    weight = engines.worker._policy.model.decoder.layers[1].mlp.router.weight
    weight.data[1] = weight.data[0]
    engines.worker._policy.weights_loaded()


def nothing(_: Any) -> None:
    pass


def sampler_layer(engines: Pair, index: int) -> Any:
    return engines.engine.model.layers[index]  # type: ignore[attr-defined]


def outer_scale(engines: Pair) -> None:
    layer = sampler_layer(engines, 1)
    layer.gate_up.buffers["weight_amax"].copy_(layer.down.buffers["weight_amax"].expand(-1, 2))


def gate_for_up(engines: Pair) -> None:
    """Two outer scales, swapped or not, are refused at the load (tests/sampler/test_embedded_weights.py); block scales
    are not."""
    scale_ENG = sampler_layer(engines, 1).gate_up.buffers["weight_scale"].view(torch.uint8)
    scale_ENG.copy_(torch.cat(scale_ENG.chunk(2, dim=1)[::-1], dim=1))


def block_scale(engines: Pair) -> None:
    scale = sampler_layer(engines, 0).o.buffers["weight_scale"]
    scale.view(torch.uint8).copy_(scale.view(torch.uint8).roll(1, -1))


def tensor_amax(engines: Pair) -> None:
    sampler_layer(engines, 1).qkv.input_operand = "nvfp4_tensor"


def stale_expert(engines: Pair) -> None:
    codes = sampler_layer(engines, 1).down.buffers["weight"]
    codes[2] = codes[2].roll(1, -1)


def fp8_cache(engines: Pair) -> None:
    engine: Any = engines.engine
    engine.cache = KVCache(engine.config.model, "fp8", engine.cache.slots, engine.model.dtype, engine.device)


def rope_base(engines: Pair) -> None:
    model: Any = engines.engine.model  # type: ignore[attr-defined]
    model.config = replace(model.config, rope_theta=500.0)


def eps_of_one_norm(engines: Pair) -> None:
    engines.worker._policy.model.decoder.layers[1].pre_mlp_layernorm.eps = 0.1


def attention_scale(engines: Pair) -> None:
    engines.engine.scale *= 1.25  # type: ignore[attr-defined]


def ties_to_the_higher(patch: Any) -> None:
    def route(logits_TE: torch.Tensor, k: int, replay_Tk: None = None) -> tuple[torch.Tensor, torch.Tensor]:
        last = logits_TE.shape[1] - 1
        expert_Tk = last - logits_TE.flip(1).sort(dim=-1, descending=True, stable=True).indices[:, :k]
        return logits_TE.gather(-1, expert_Tk).softmax(dim=-1), expert_Tk

    patch.setattr(ops, "route_topk", route)


def combined_in_bf16(patch: Any) -> None:
    def combine(y_RH: Any, prob_R: Any, token_R: Any, num_tokens: int, strict: bool, fused: None = None) -> Any:
        return y_RH.new_zeros(num_tokens, y_RH.shape[1]).index_add(0, token_R, y_RH * prob_R[:, None].to(y_RH.dtype))

    patch.setattr(ops, "moe_combine", combine)


def swapped_swiglu(patch: Any) -> None:
    inner = ops.swiglu
    patch.setattr(ops, "swiglu", lambda x, *rest: inner(torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1), *rest))


@pytest.mark.parametrize(
    ("before", "during", "module", "cause"),
    [
        (outer_scale, nothing, "model.layers.1.mlp.experts.gate_up_proj", "weight outer scale"),
        (gate_for_up, nothing, "model.layers.1.mlp.experts.gate_up_proj", "weight block scales (experts 0, 1, 2, 3:"),
        (block_scale, nothing, "model.layers.0.self_attn.o_proj", "weight block scales"),
        (tensor_amax, nothing, "model.layers.1.self_attn.qkv_proj", "input operand: nvfp4_row in the learner, nvfp4_t"),
        (stale_expert, nothing, "model.layers.1.mlp.experts.down_proj", "weight codes (expert 2:"),
        (fp8_cache, nothing, "model.layers.0.self_attn.kv_cache", "KV cache"),
        (rope_base, nothing, "model.layers.0.self_attn.q_rope", "RoPE table"),
        (eps_of_one_norm, nothing, "model.layers.1.post_attention_layernorm", "norm eps: 0.1 in the learner, 1e-06"),
        (attention_scale, nothing, "model.layers.0.self_attn.attention", "attention"),
        (nothing, ties_to_the_higher, "model.layers.1.mlp.router", "router choice: experts"),
        (nothing, combined_in_bf16, "model.layers.0.mlp.experts.combine", "combine order"),
        (nothing, swapped_swiglu, "model.layers.0.mlp.experts.swiglu", "SwiGLU"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_planted_fault_is_named(
    subject: Subject, monkeypatch: Any, before: Any, during: Any, module: str, cause: str
) -> None:
    report = examine(subject, before, during, monkeypatch)
    assert report.first == module
    assert report.cause.startswith(cause)


def test_strict_engines_differ_in_nothing(subject: Subject, monkeypatch: Any) -> None:
    """And everything was looked at: 16 operations a layer, each on every token that the sampler feeds back."""
    report = examine(subject, nothing, nothing, monkeypatch)
    assert report.first is None and not any(f.differs for f in report.findings)
    assert len(report.findings) == 16 * 2 + 2
    assert report.responses == 16
    fed = report.tokens - report.responses  # the last token of a response is sampled and never fed
    assert {f.tokens for f in report.findings if f.module.startswith("model.layers")} == {fed}
    assert all(f.equal_inputs == f.tokens for f in report.findings)


def test_a_dense_model_without_head_norms(tmp_path: Path, monkeypatch: Any) -> None:
    """Llama's operations are fewer; the o_proj of layer 1 holds the fault."""
    dense = (
        "model.kind=llama", "model.num_experts=0", "model.experts_per_token=0", "model.moe_intermediate_size=0",
        "model.intermediate_size=48",
        'precision.rules=[{match: "model.layers.**", use: w4a4}, {match: "**", use: bf16}]',
    )  # fmt: skip
    subject = open_subject(recipe(tmp_path), [*OVERRIDES, *dense], None, lambda line: None)
    with pair(subject.config, subject.plan) as engines:
        engines.sync()
        sampler_layer(engines, 1).o.input_operand = "bf16"
        batch, theirs = watch_sampler(engines, subject)
        ours = watch_learner(engines, subject, batch)
        assert engines.engine.model.backend.name in ("reference", "cpu")  # as before, outside of the watch
    report = compare(ours, theirs, batch.cu_seqlens_S1)
    assert report.first == "model.layers.1.self_attn.o_proj"
    assert report.cause.startswith("input operand: nvfp4_row in the learner, bf16 in the sampler")
