"""Fixed-output serving by a recipe's own sampler, and by the same in BF16: `minite bench sampler`.

Weights are random and come as a learner's do, packed and verified. One engine after the other, each for itself.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing

import torch
from torch import Tensor

from minite.backends.device import use_cuda
from minite.backends.registry import get_backend
from minite.config import PrecisionPlan, RunConfig, resolve_plan
from minite.config.schema import PrecisionConfig
from minite.errors import UserError
from minite.models import get_model
from minite.sampler import make_engine
from minite.sampler.engine import Engine, Request, SamplingParams, update_weights
from minite.sync.export import pack
from minite.sync.stored import MODEL_DTYPES
from minite.sync.transport import package

BATCHES, PROMPT, TOKENS = (16, 64, 256), 16, 256  # requests at once; tokens of a prompt, and of a response
Row = dict[str, float | str]


def measure(config: RunConfig, turns: int, tokens: int | None = None, batches: tuple[int, ...] = BATCHES) -> list[Row]:
    """Tokens a second by batch and run, median of ``turns`` after one that warms up, and seconds of the weight update.

    tokens: of each response (default: 256, or what the model has room for). Raises UserError for more than that.
    """
    room = config.model.max_seq_len - PROMPT
    tokens = min(TOKENS, room) if tokens is None else tokens
    if tokens > room:
        raise UserError(f"bench sampler: --tokens {tokens}, but the model has room for {room} after a prompt")
    rows: list[Row] = []
    sampler = dataclasses.replace(config.sampler, max_batch=max(batches), kv_tokens=max(batches) * (PROMPT + tokens))
    config = dataclasses.replace(config, sampler=sampler)
    precision = dataclasses.replace(config.precision, formats={}, rules=PrecisionConfig().rules)
    for name, each in (("BF16", dataclasses.replace(config, precision=precision)), (config.name, config)):
        rows += _measure(each, name, batches, tokens, turns)
    base = {row["batch"]: float(row["tokens/s"]) for row in rows[: len(batches)]}
    for row in rows:
        row["speedup"] = float(row["tokens/s"]) / base[row["batch"]]
    return sorted(rows, key=lambda row: float(row["batch"]))


def _measure(config: RunConfig, name: str, batches: tuple[int, ...], tokens: int, turns: int) -> list[Row]:
    """Of one engine, whose memory is free again on return."""
    rows: list[Row] = []
    plan = resolve_plan(config)
    with closing(make_engine(config, plan)) as engine:
        update = _update(engine, config, plan)
        for batch in batches:
            rate = statistics.median([_generate(engine, config, batch, tokens) for _ in range(turns + 1)][1:])
            rows.append({"batch": batch, "run": name, "tokens/s": rate, "update s": update})
            print(f"{name}, batch {batch}: {rate:.0f} tokens/s", file=sys.stderr, flush=True)
    return rows


def table(rows: list[Row], config: RunConfig) -> str:
    """The rows as text."""
    lines = [
        f"sampler {config.sampler.kind}, fixed output, random weights",
        "batch  tokens/s  to BF16  update [s]  run",
    ]
    for r in rows:
        lines.append(f"{r['batch']:5} {r['tokens/s']:9.0f} {r['speedup']:8.2f} {r['update s']:11.2f}  {r['run']}")
    return "\n".join(lines)


def _update(engine: Engine, config: RunConfig, plan: PrecisionPlan) -> float:
    """Give the engine random weights. Seconds from the first packed byte sent to the last verified."""
    device = "cuda" if use_cuda(config, "sampler") else "cpu"
    backend = get_backend(plan.backend, device=device, strict=plan.alignment == "strict")
    shapes = get_model(config.model.kind).hf_tensors(config.model)
    buckets, version = package(pack(plan, _weights(config, device), backend, shapes=shapes), 0, plan.digest)
    start = time.perf_counter()
    update_weights(engine, buckets, version)
    return time.perf_counter() - start


def _weights(config: RunConfig, device: str) -> Iterator[tuple[str, Tensor]]:
    made = torch.Generator(device).manual_seed(config.seed)
    dtype = MODEL_DTYPES[config.model.dtype]
    for name, shape in get_model(config.model.kind).hf_tensors(config.model).items():
        if len(shape) == 1:  # norms
            yield name, torch.ones(shape, dtype=dtype, device=device)
        else:
            yield name, torch.randn(shape, generator=made, dtype=dtype, device=device) * config.model.init_std


def _generate(engine: Engine, config: RunConfig, batch: int, tokens: int) -> float:
    """Tokens a second of ``batch`` requests of ``tokens`` each, none of which stops before; prefill included."""
    made = torch.Generator().manual_seed(batch)
    prompts = torch.randint(0, config.model.vocab_size, (batch, PROMPT), generator=made).tolist()
    asked = [Request(str(i), tuple(p), SamplingParams(tokens, seed=i)) for i, p in enumerate(prompts)]
    start = time.perf_counter()
    done = engine.generate(asked)
    took = time.perf_counter() - start
    assert all(len(c.tokens) == tokens for c in done)
    return batch * tokens / took
