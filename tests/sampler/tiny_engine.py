"""Tiny models, random weights and engines for the sampler's tests."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from minite.backends.registry import get_backend
from minite.config import PrecisionPlan, RunConfig, config_from_dict, resolve_plan
from minite.models import get_model
from minite.sampler.embedded import EmbeddedEngine
from minite.sampler.engine import Request, SamplingParams
from minite.sampler.engine import update_weights as load
from minite.sync.export import pack, unquantized
from minite.sync.transport import Bucket, package
from minite.types import WeightVersion

MOE = {"kind": "qwen3_moe", "num_experts": 4, "experts_per_token": 2, "moe_intermediate_size": 32}
DENSE = {"kind": "qwen3", "intermediate_size": 64}
LLAMA = {"kind": "llama", "intermediate_size": 64}
SIZES = {
    "num_layers": 2, "hidden_size": 64, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "vocab_size": 40,
    "max_seq_len": 64, "rope_theta": 10000.0,
}  # fmt: skip
QUANTIZED = {
    "w4a4": {"weight": "nvfp4_1d", "input": "nvfp4_row"},
    "w4a4_2d": {"weight": "nvfp4_2d", "input": "nvfp4_row"},
    "w4a4_tensor": {"weight": "nvfp4_1d", "input": "nvfp4_tensor"},
    "w4a16": {"weight": "nvfp4_1d"},
    "w4a8": {"weight": "nvfp4_1d", "input": "mxfp8"},
    "w8a8": {"weight": "mxfp8", "input": "mxfp8"},
}


def config(
    model: dict = MOE, fmt: str = "bf16", *, dtype: str = "bf16", sampler: dict | None = None, **precision: object
) -> RunConfig:
    """A recipe whose every linear but router and LM head has the format ``fmt``."""
    if fmt != "bf16":
        router = [{"match": "model.layers.*.mlp.gate", "use": "bf16"}] if model is MOE else []
        rules = [*router, {"match": "model.layers.**", "use": fmt}, {"match": "**", "use": "bf16"}]
        precision = {"formats": {fmt: QUANTIZED[fmt]}, "rules": rules, **precision}
    return config_from_dict(
        {
            "name": "tiny",
            "model": {**SIZES, **model, "dtype": dtype},
            "precision": precision,
            "sampler": {"kv_tokens": 2048, "max_new_tokens": 8, **(sampler or {})},
        },
        "tiny.yaml",
    )


def random_weights(cfg: RunConfig, seed: int = 0) -> dict[str, Tensor]:
    """HF-named weights whose logits are far from uniform."""
    g = torch.Generator().manual_seed(seed)
    dtype = {"bf16": torch.bfloat16, "fp32": torch.float32}[cfg.model.dtype]
    weights = {}
    for name, shape in get_model(cfg.model.kind).hf_tensors(cfg.model).items():
        noise = torch.randn(shape, generator=g)
        weights[name] = (1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5 * 1.5).to(dtype)
    return weights


def shipment(cfg: RunConfig, seed: int = 0, step: int = 0) -> tuple[list[Bucket], WeightVersion]:
    """What a learner with random weights would send."""
    plan = resolve_plan(cfg)
    backend = get_backend(plan.backend, device="cpu", strict=plan.alignment == "strict")
    shapes = get_model(cfg.model.kind).hf_tensors(cfg.model)
    if cfg.sampler.transport == "model_dtype":
        groups, digest = unquantized(plan, random_weights(cfg, seed).items(), backend, shapes=shapes)
        return package(groups, step, plan.digest, quantized=digest)
    return package(pack(plan, random_weights(cfg, seed).items(), backend, shapes=shapes), step, plan.digest)


def engine(cfg: RunConfig, seed: int = 0, progress: Callable | None = None) -> EmbeddedEngine:
    """An engine ready to generate."""
    plan: PrecisionPlan = resolve_plan(cfg)
    made = EmbeddedEngine(cfg, plan, "cpu", progress)
    load(made, *shipment(cfg, seed))
    return made


def requests(count: int, seed: int = 0, *, longest: int = 12, **params: object) -> list[Request]:
    """Requests of random prompts and lengths, each with a seed of its own."""
    g = torch.Generator().manual_seed(seed)
    made = []
    for i in range(count):
        length = int(torch.randint(1, longest + 1, (), generator=g))
        prompt = tuple(torch.randint(0, SIZES["vocab_size"], (length,), generator=g).tolist())
        new = int(torch.randint(1, 9, (), generator=g))
        sampling = SamplingParams(**{"max_new_tokens": new, "seed": 1000 * seed + i, **params})
        made.append(Request(f"r{seed}.{i}", prompt, sampling))
    return made
