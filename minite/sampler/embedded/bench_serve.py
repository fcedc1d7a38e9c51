"""Serving Qwen3-30B-A3B with random weights on one GPU, W4A4 beside BF16: `minite bench serve`.

By batch: a decode step over 1,024 tokens of context (median of replays of the engine's own CUDA graph), and a run of
1,024 generated tokens a request through the engine, drawn at temperature 1: sampling and all work of the host is in it.
One model after the other: both do not fit on one GPU with their caches.
"""

from __future__ import annotations

import gc
import sys
import time
from dataclasses import replace

import torch
from torch import Tensor

from minite.backends.triton.timing import medians
from minite.config import load_recipe, resolve_plan
from minite.config.load import shipped
from minite.config.schema import RunConfig
from minite.sampler.embedded.engine import EmbeddedEngine
from minite.sampler.engine import Request, SamplingParams
from minite.types import WeightVersion

RECIPES = {"BF16": "qwen3_30b_a3b_bf16_grpo.yaml", "W4A4": "qwen3_30b_a3b_w4a4_grpo.yaml"}
BATCHES, CONTEXT, PROMPT = (1, 16, 64, 256), 1024, 16  # context: of the step; new tokens of the run
Row = dict[str, float | str]


def random_engine(config: RunConfig, batch: int, length: int) -> EmbeddedEngine:
    """The recipe's engine for ``batch`` requests of ``length`` tokens, its random weights made on the device."""
    sampler = replace(config.sampler, max_batch=batch, kv_tokens=batch * length)
    engine = EmbeddedEngine(replace(config, sampler=sampler), resolve_plan(config), "cuda")
    weights = engine.model.weights
    in_linears = {name for linear in weights.linears for name in linear.views}
    for name, tensor in weights.views.items():
        if name not in in_linears:
            _fill(tensor)
    for linear in weights.linears:
        for buffer in linear.buffers.values():
            _fill(buffer)
    engine.model.prepare()
    engine._gate.version = WeightVersion(0, engine.plan.digest, "random")
    return engine


def _fill(tensor: Tensor) -> None:
    if tensor.dtype == torch.uint8:
        tensor.random_(0, 256)
    elif tensor.dtype == torch.float8_e4m3fn:  # block scales from 1 to 1.875
        tensor.view(torch.uint8).random_(0x38, 0x40)
    elif tensor.dtype == torch.float32:  # outer amax, so that values are about 0.03
        tensor.fill_(30.0)
    elif tensor.ndim == 1:  # norms
        tensor.fill_(1.0)
    else:
        tensor.normal_(std=0.03)


def measure(batches: tuple[int, ...] = BATCHES, tokens: int = CONTEXT, layers: int | None = None) -> list[Row]:
    """Times by batch and model, with the memory. layers: fewer of them, to try this out."""
    rows: list[Row] = []
    for name, recipe in RECIPES.items():
        config = load_recipe(shipped(recipe), [] if layers is None else [f"model.num_layers={layers}"])
        before = torch.cuda.memory_allocated()
        engine = random_engine(config, max(batches), PROMPT + tokens)
        cache = sum(pool.nbytes for pool in (*engine.cache.k, *engine.cache.v))
        held = torch.cuda.memory_allocated() - before - cache
        for batch in batches:
            step, rate = step_time(engine, batch, tokens), generated(engine, batch, tokens)
            print(f"{name}, batch {batch}: step {step:.2f} ms, {rate:.0f} tokens/s", file=sys.stderr)
            rows.append({"batch": batch, "run": name, "step ms": step, "tokens/s": rate, "weights GB": held / 1e9})
            rows[-1] |= {"cache GB": cache / 1e9}
        assert engine.graphs is not None
        for row in rows[-len(batches) :]:
            row["graphs GB"] = engine.graphs.bytes / 1e9
        del engine
        gc.collect()  # an engine and its graphs hold each other
        torch.cuda.empty_cache()
    base = {row["batch"]: row for row in rows if row["run"] == "BF16"}
    for row in rows:
        row["step speedup"] = float(base[row["batch"]]["step ms"]) / float(row["step ms"])
        row["speedup"] = float(row["tokens/s"]) / float(base[row["batch"]]["tokens/s"])
    return sorted(rows, key=lambda row: float(row["batch"]))


def step_time(engine: EmbeddedEngine, batch: int, context: int) -> float:
    """Median of replays of a decode step [ms], each sequence with ``context`` tokens."""
    assert engine.graphs is not None
    for pool in (*engine.cache.k, *engine.cache.v):
        pool.normal_()
    slots = [(i + 1) * context - 1 for i in range(batch)]
    engine.graphs.decode([i % 1000 for i in range(batch)], [context] * batch, slots)
    size = next(s for s in engine.graphs.sizes if s >= batch)
    return medians({}, 8, {"step": engine.graphs.captured(size).graph.replay})["step"]


def generated(engine: EmbeddedEngine, batch: int, tokens: int) -> float:
    """Tokens per second of ``batch`` requests that generate ``tokens`` each; prefill of their prompts included."""
    elapsed = 0.0
    for new in (2, tokens):  # the first warms up
        prompts = torch.randint(0, engine.config.model.vocab_size, (batch, PROMPT)).tolist()
        requests = [Request(str(i), tuple(p), SamplingParams(new, seed=i)) for i, p in enumerate(prompts)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        engine.generate(requests)
        elapsed = time.perf_counter() - start
    return batch * tokens / elapsed
