"""Time of a prefill and of a decode step: ``python -m minite.sampler.embedded.bench RECIPE [--device cuda]``.

Random weights, random prompts of 8 tokens, 8 new tokens each. Processor time on a CPU, so that a busy machine does
not change the reading; wall time on a GPU.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch

from minite.config import RunConfig, load_recipe, resolve_plan
from minite.models import get_model
from minite.sampler.embedded.engine import EmbeddedEngine
from minite.sampler.engine import EngineStats, Request, SamplingParams, update_weights
from minite.sync.export import FormatQuantizer, pack
from minite.sync.stored import MODEL_DTYPES
from minite.sync.transport import package

PROMPT_TOKENS = NEW_TOKENS = 8


def random_engine(config: RunConfig, device: str, progress: Callable[[EngineStats], None]) -> EmbeddedEngine:
    """An engine with random weights."""
    plan, shapes = resolve_plan(config), get_model(config.model.kind).hf_tensors(config.model)
    dtype = MODEL_DTYPES[config.model.dtype]
    named = ((name, (torch.randn(shape) * shape[-1] ** -0.5).to(dtype)) for name, shape in shapes.items())
    buckets, version = package(pack(plan, named, FormatQuantizer(), shapes=shapes), 0, plan.digest)
    engine = EmbeddedEngine(config, plan, device, progress)
    update_weights(engine, buckets, version)
    return engine


def measure(config: RunConfig, device: str, batch: int, group: int, rounds: int) -> tuple[float, float]:
    """Medians of (prefill of ``batch`` requests, one decode step) [ms]; ``group`` requests share a prompt."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    marks: list[float] = []
    engine = random_engine(config, device, lambda stats: marks.append(clock()))
    prefill, decode = [], []
    for r in range(rounds + 1):
        prompts = torch.randint(0, config.model.vocab_size, (batch // group, PROMPT_TOKENS)).tolist()
        requests = [
            Request(f"{r}.{i}", tuple(prompts[i // group]), SamplingParams(NEW_TOKENS, seed=i)) for i in range(batch)
        ]
        marks[:] = [clock()]
        engine.generate(requests)
        steps = [1e3 * (b - a) for a, b in zip(marks, marks[1:], strict=False)]
        if r > 0:  # the first round warms up
            prefill.append(steps[0])
            decode += steps[1:]
    return statistics.median(prefill), statistics.median(decode)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m minite.sampler.embedded.bench", description=__doc__)
    parser.add_argument("recipe")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    config = load_recipe(args.recipe, [f"sampler.max_batch={args.batch}"])
    for group in (1, 8):
        prefill, decode = measure(config, args.device, args.batch, group, args.rounds)
        shape = f"{args.batch} requests x {PROMPT_TOKENS} tokens, {group} per prompt"
        print(f"{config.name} on {args.device}: {shape}: prefill {prefill:.1f} ms, decode step {decode:.1f} ms")


if __name__ == "__main__":
    main()
