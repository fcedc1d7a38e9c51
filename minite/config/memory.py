"""How much memory a GPU needs for a recipe: arithmetic on shapes and parallel sizes, nothing is measured.

Letters: T tokens of a microbatch, t tensor-parallel, e expert-parallel, P parameters of a rank. What is counted:

    weights      2 B (4 B in FP32) a parameter; linears, embedding and LM head / t, experts / e
    gradients    4 B a parameter
    optimizer    12 B a parameter (FP32 master and two moments of Adam), spread over the ranks that hold the same ones
    codes        what the plan stores of quantized weights, beside the working weights
    activations  by layer and token the inputs of GEMMs, / t; with recompute one layer of them, and each layer's input
    logits       three FP32 arrays [T, V] (values, softmax, gradient); slime splits V over t
    engine       weights as the plan stores them; KV cache: K and V of every layer and token

Not counted: the CUDA context, communication buffers, fragmentation, graphs of the engine; leave about 10 GiB.
"""

from __future__ import annotations

from dataclasses import dataclass

from minite.config.operands import OPERANDS
from minite.config.plan import PrecisionPlan
from minite.config.schema import ModelConfig, RunConfig
from minite.models import ModelFamily, get_model

GIB = 1 << 30
_LOGIT_ARRAYS = 3
_DTYPE_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True)
class Parameters:
    """How many of them there are on one learner rank."""

    common: int  # everything but experts
    experts: int


@dataclass(frozen=True)
class LearnerMemory:
    """Of one learner rank [B]."""

    weights: float
    gradients: float
    optimizer: float
    codes: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        return float(sum(vars(self).values()))


@dataclass(frozen=True)
class EngineMemory:
    """Of one GPU of a rollout engine [B]."""

    weights: float
    kv_cache: float
    kv_tokens: int  # that the engine's cache has room for

    @property
    def total(self) -> float:
        return self.weights + self.kv_cache


def rank_parameters(config: RunConfig) -> Parameters:
    """Parameters of one learner rank. Experts are never cut, routers and norms are on every rank."""
    m, x = config.model, config.learner
    family = get_model(m.kind)
    common = experts = 0
    for name, shape in family.hf_tensors(m).items():
        size = shape[0] * (shape[1] if len(shape) == 2 else 1)
        if ".experts." in name:
            experts += size
        else:
            common += size // (x.tensor_parallel if _split(family, name) else 1)
    return Parameters(common, experts // x.expert_parallel)


def learner_memory(config: RunConfig, plan: PrecisionPlan, *, slime: bool) -> LearnerMemory:
    """One rank of the learner while it trains."""
    m, x = config.model, config.learner
    p = rank_parameters(config)
    count = p.common + p.experts
    # The ranks that hold the same parameters share their optimizer state: data parallel, and for experts those left.
    moments = 0.0
    if not (slime and config.slime.offload_optimizer):
        moments = 12.0 * (p.common / x.data_ranks + p.experts / (x.world_size / x.expert_parallel))
    tokens = x.tokens_per_microbatch
    wide = 8 if plan.alignment == "strict" else 4
    return LearnerMemory(
        weights=float(count * _DTYPE_BYTES[m.dtype]),
        gradients=4.0 * count,
        optimizer=moments,
        codes=_codes(config, plan),
        activations=_activations(m, tokens / x.tensor_parallel, x.recompute),
        logits=float(_LOGIT_ARRAYS * wide * tokens * m.vocab_size / (x.tensor_parallel if slime else 1)),
    )


def engine_memory(config: RunConfig, plan: PrecisionPlan, gpus: int, gpu_bytes: float | None) -> EngineMemory:
    """One GPU of an engine that is spread over ``gpus``.

    The KV cache is ``sampler.kv_tokens`` of the recipe, or, given the memory of a GPU, what slime.memory_fraction of it
    leaves beside the weights.
    """
    m = config.model
    weights = stored_bytes(config, plan) / gpus
    # An FP8 cache has one FP32 scale per token and head beside its values.
    value = 1 + 4 / m.head_dim if plan.kv_cache == "fp8" else _DTYPE_BYTES[m.dtype]
    token = 2 * m.num_layers * m.num_kv_heads * m.head_dim * value / gpus
    if gpu_bytes is None:
        return EngineMemory(weights, config.sampler.kv_tokens * token, config.sampler.kv_tokens)
    room = max(0.0, config.slime.memory_fraction * gpu_bytes - weights)
    return EngineMemory(weights, room, int(room // token))


def stored_bytes(config: RunConfig, plan: PrecisionPlan) -> float:
    """All weights as the plan stores them: what an engine holds, and what a sync sends, less its manifest."""
    total = 0.0
    for name, shape in get_model(config.model.kind).hf_tensors(config.model).items():
        entry = plan.get(name.removesuffix(".weight"))
        size = shape[0] * (shape[1] if len(shape) == 2 else 1)
        quantized = entry is not None and entry.weight != "bf16"
        total += size * (OPERANDS[entry.weight].bits / 8 if entry and quantized else _DTYPE_BYTES[config.model.dtype])
    return total


def table(config: RunConfig, plan: PrecisionPlan, gpu_gib: float) -> str:
    """What `minite plan --memory` prints: GiB a GPU, in `minite train` and in the two phases of slime."""
    embedded, slime = learner_memory(config, plan, slime=False), learner_memory(config, plan, slime=True)
    own = engine_memory(config, plan, 1, None)
    theirs = engine_memory(config, plan, config.slime.gpus_per_engine, gpu_gib * GIB)
    x = config.learner
    shared = config.driver.placement == "colocated"
    rows = [("", "minite train", "slime training", "slime rollout")]
    rows += [(name, _gib(getattr(embedded, name)), _gib(getattr(slime, name)), "") for name in vars(embedded)]
    rows += [("engine weights", _gib(own.weights), "", _gib(theirs.weights))]
    rows += [("KV cache", _gib(own.kv_cache), "", _gib(theirs.kv_cache))]
    both = embedded.total + own.total if shared else max(embedded.total, own.total)
    rows += [("total", _gib(both), _gib(slime.total), _gib(theirs.total))]
    rows += [("KV tokens", f"{own.kv_tokens:,}", "", f"{theirs.kv_tokens:,}")]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    lines = [
        "  ".join([row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]).rstrip()
        for row in rows
    ]
    head = (
        f"GiB per GPU of {gpu_gib:g}; {x.world_size} learner ranks: tensor {x.tensor_parallel}, expert "
        f"{x.expert_parallel}, data {x.data_ranks}; engines on {config.slime.gpus_per_engine} GPU in slime"
    )
    return "\n".join([head, "", *lines])


def _split(family: ModelFamily, name: str) -> bool:
    module = name.removesuffix(".weight")
    if module.endswith("norm"):
        return False
    return module.endswith("embed_tokens") or family.split_axis(module) is not None


def _codes(config: RunConfig, plan: PrecisionPlan) -> float:
    """Stored form of the quantized weights of one learner rank."""
    family, x = get_model(config.model.kind), config.learner
    result = 0.0
    for e in plan:
        if e.weight == "bf16":
            continue
        ranks = x.expert_parallel if ".experts." in e.name else x.tensor_parallel if family.split_axis(e.name) else 1
        result += e.n * e.k * OPERANDS[e.weight].bits / 8 / ranks
    return result


def _activations(m: ModelConfig, tokens: float, recompute: bool) -> float:
    """Kept for the backward, ``tokens`` a rank. In the model's dtype."""
    heads = 2 * (m.num_heads + m.num_kv_heads) * m.head_dim  # q, k, v and the output of attention
    wide = m.experts_per_token * (2 * m.hidden_size + 3 * m.moe_intermediate_size) or 3 * m.intermediate_size
    layer = 4 * m.hidden_size + heads + wide  # two norms and two residuals beside them
    values = m.num_layers * m.hidden_size + layer if recompute else m.num_layers * layer
    return float(_DTYPE_BYTES[m.dtype]) * tokens * values


def _gib(value: float) -> str:
    return f"{value / GIB:.1f}"
