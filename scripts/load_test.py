"""Load and leaks on a CPU: many requests, many training steps, many weight syncs; nothing lost, memory flat.

    python scripts/load_test.py                              # all three as a release wants them: up to half an hour
    python scripts/load_test.py requests --count 500         # one of them, smaller
    python scripts/load_test.py steps --count 2000 -o driver.placement=separate

requests: prompts through one built-in sampler in 20 waves, random lengths, some aborted at random times. Each must come
          back once, with the tokens it asked for or as aborted, and the KV cache must be empty again.
steps:    `minite train` as it is, with its Ray, of which driver, learner and sampler are watched.
syncs:    random weights, packed as a learner packs them, into one engine; each must be held as it was sent.

The slope is that of a line through the memory samples of the last three quarters; a leak makes it positive. Exit code 1
when something was lost or a slope is above its bound.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor

from minite.backends.registry import get_backend
from minite.config import RunConfig, load_recipe, resolve_plan
from minite.models import get_model
from minite.sampler.embedded import EmbeddedEngine
from minite.sampler.engine import Completion, EngineStats, Request, SamplingParams, update_weights
from minite.sync.export import pack
from minite.sync.transport import package
from minite.types import WeightVersion

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "scripts" / "load_test.yaml"
COUNTS = {"requests": 10_000, "steps": 2_000, "syncs": 1_000}
BOUND = {"requests": 4.0, "steps": 4.0, "syncs": 4.0}  # KiB per request, step, sync
# Why: a sync moves 40 KB of weights, a step some 5 KB of rollout besides, a request a few KB of answer: keeping any of
# them shows, and what an allocator does (some 2 MB that come and go) does not. 2,000 steps at the bound are 8 MB.
WAVES, STOP = 20, 1  # calls of the engine for all requests; the token that ends an answer
ABORTED = 0.1  # share of the requests that somebody stops asking for


@dataclass
class Outcome:
    """One line of the table, and what is wrong with it."""

    name: str
    count: int
    seconds: float = 0.0
    said: str = ""
    memory: dict[str, list[tuple[int, int]]] = field(default_factory=dict)  # process -> (count, RSS [bytes])
    wrong: list[str] = field(default_factory=list)

    def check_memory(self) -> None:
        """Adds what grew."""
        for who, samples in self.memory.items():
            if not samples:
                self.wrong.append(f"{who} was never seen")
            elif slope(samples) > BOUND[self.name]:
                self.wrong.append(f"{who} grows by {slope(samples):.2f} KiB each, at most {BOUND[self.name]:g} allowed")


def slope(samples: list[tuple[int, int]]) -> float:
    """Growth of the memory over the last three quarters. [KiB each]"""
    last = [s for s in samples if s[0] >= samples[-1][0] / 4]
    if len(last) < 3:
        return float("nan")
    x, y = np.array(last, dtype=float).T
    return float(np.polyfit(x, y, 1)[0]) / 1024


def tell(words: str) -> None:
    """A line that replaces itself on a terminal."""
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"\033[K{words}" if sys.stderr.isatty() else words, end=end, file=sys.stderr, flush=True)


def ship(engine: EmbeddedEngine, config: RunConfig, seed: int) -> tuple[str, WeightVersion]:
    """Random weights into the engine: (digest of what it holds, version that was sent)."""
    generator = torch.Generator().manual_seed(seed)
    shapes = get_model(config.model.kind).hf_tensors(config.model)
    plan, backend = engine.plan, get_backend(engine.plan.backend, device="cpu", strict=False)

    def random_tensor(shape: tuple[int, ...]) -> Tensor:
        noise = torch.randn(shape, generator=generator)
        return (1 + 0.1 * noise if len(shape) == 1 else noise * shape[-1] ** -0.5).bfloat16()

    weights = {name: random_tensor(shape) for name, shape in shapes.items()}
    buckets, version = package(pack(plan, weights.items(), backend, shapes=shapes), seed, plan.digest)
    return update_weights(engine, buckets, version), version


def make_engine(config: RunConfig, progress: Callable[[EngineStats], None] | None = None) -> EmbeddedEngine:
    engine = EmbeddedEngine(config, resolve_plan(config), "cpu", progress)
    ship(engine, config, 0)
    return engine


def requests(config: RunConfig, count: int, seed: int) -> Outcome:
    """In waves into one engine; in every step some are given up, waiting ones and running ones alike."""
    outcome, rng, me = Outcome("requests", count, memory={"engine": []}), random.Random(seed), psutil.Process()
    unwanted: list[str] = []
    given_up: set[str] = set()

    def progress(stats: EngineStats) -> None:
        now = [unwanted.pop() for _ in range(min(rng.randrange(4), len(unwanted)))]
        given_up.update(name for name in now if engine.abort([name]))

    engine, started, ended = make_engine(config, progress), time.monotonic(), Counter[str]()
    for first in range(0, count, max(count // WAVES, 1)):
        wave = [_request(rng, i, config) for i in range(first, min(first + max(count // WAVES, 1), count))]
        unwanted[:] = rng.sample([r.request_id for r in wave], int(ABORTED * len(wave)))
        completions = engine.generate(wave)
        ended.update(c.finish_reason for c in completions)
        outcome.wrong += [w for r, c in zip(wave, completions, strict=True) if (w := _wrong(r, c, given_up))]
        if engine.stats().kv_tokens_used or engine.stats().running:
            outcome.wrong.append(f"{engine.stats().kv_tokens_used} KV tokens are used after all have ended")
        outcome.memory["engine"].append((first + len(wave), me.memory_info().rss))
        tell(f"requests: {first + len(wave)} of {count}")
    outcome.seconds = time.monotonic() - started
    outcome.said = ", ".join(f"{number} {reason}" for reason, number in sorted(ended.items()))
    if ended.total() != count or ended["abort"] != len(given_up):
        outcome.wrong.append(f"of {count} requests and {len(given_up)} aborted ones came back: {outcome.said}")
    if engine.scheduler.ranges.take(config.sampler.kv_tokens) != 0:
        outcome.wrong.append("the KV cache is not one free range again")
    return outcome


def _request(rng: random.Random, number: int, config: RunConfig) -> Request:
    prompt = tuple(rng.randrange(config.model.vocab_size) for _ in range(rng.randint(1, 40)))
    return Request(f"r{number}", prompt, SamplingParams(rng.randint(1, 24), stop_token_ids=(STOP,), seed=number))


def _wrong(request: Request, completion: Completion, given_up: set[str]) -> str | None:
    """What does not fit between a request and its answer."""
    reason, tokens, wanted = completion.finish_reason, completion.tokens, request.params.max_new_tokens
    fits = {
        "abort": request.request_id in given_up and len(tokens) < wanted,
        "stop": STOP in tokens[-1:],
        "length": len(tokens) == wanted,
    }[reason]
    if fits and completion.request_id == request.request_id and completion.prompt_tokens == request.prompt_tokens:
        return None
    return f"{request.request_id} came back as {completion.request_id}: {reason} after {len(tokens)} of {wanted} tokens"


def syncs(config: RunConfig, count: int, seed: int) -> Outcome:
    """New weights again and again; the engine hashes what it holds each time."""
    engine, me, started = make_engine(config), psutil.Process(), time.monotonic()
    outcome, seen = Outcome("syncs", count, memory={"engine": []}), set()
    for i in range(1, count + 1):
        held, version = ship(engine, config, seed * count + i)
        seen.add(held)
        if held != version.weight_digest:
            outcome.wrong.append(f"sync {i}: other weights are held than were sent")
        if i % max(count // 100, 1) == 0:
            outcome.memory["engine"].append((i, me.memory_info().rss))
            tell(f"syncs: {i} of {count}")
    outcome.seconds, outcome.said = time.monotonic() - started, f"{len(seen)} different weights held"
    if len(seen) != count:
        outcome.wrong.append(outcome.said)
    return outcome


def steps(count: int, settings: list[str]) -> Outcome:
    """A run in a process of its own, watched from outside."""
    outcome = Outcome("steps", count, memory={"driver": [], "learner": [], "sampler": []})
    with tempfile.TemporaryDirectory() as folder:
        words = [word for setting in (f"driver.steps={count}", *settings) for word in ("-o", setting)]
        command = [sys.executable, "-m", "minite.cli", "train", str(RECIPE), "--run-dir", "run", *words]
        paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        with (Path(folder) / "log.txt").open("w") as log:
            environment = {**os.environ, "PYTHONPATH": paths}
            run = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            started = _watch(run, Path(folder) / "run" / "metrics.jsonl", outcome)
            outcome.seconds = time.monotonic() - started
        finally:
            run.terminate()
            run.wait()
        lines = _lines(Path(folder) / "run" / "metrics.jsonl")
        outcome.said = f"{len(lines)} lines of metrics"
        if run.returncode != 0 or len(lines) != count + 1:
            last = (Path(folder) / "log.txt").read_text().splitlines()[-3:]
            outcome.wrong.append(f"exit code {run.returncode}, {outcome.said}: {' / '.join(last)}")
    return outcome


def _watch(run: subprocess.Popen[bytes], metrics: Path, outcome: Outcome) -> float:
    """Samples of memory until the run ends. Returns when its first step was seen."""
    started = time.monotonic()
    while run.poll() is None:
        done = len(_lines(metrics)) - 1
        with suppress(psutil.Error):  # a process that has just ended
            for who, process in _processes(run.pid).items():
                if done > 0:
                    outcome.memory[who].append((done, process.memory_info().rss))
        started = started if done > 0 else time.monotonic()
        tell(f"steps: {max(done, 0)} of {outcome.count}")
        time.sleep(5 if outcome.count > 100 else 0.5)
    return started


def _processes(pid: int) -> dict[str, psutil.Process]:
    driver, found = psutil.Process(pid), {}
    for child in driver.children(recursive=True):
        for who, title in (("learner", "ray::_Learner"), ("sampler", "ray::_Sampler")):
            if " ".join(child.cmdline()).startswith(title):
                found[who] = child
    return {"driver": driver, **found}


def _lines(metrics: Path) -> list[dict[str, float]]:
    whole = metrics.read_text().rpartition("\n")[0].splitlines() if metrics.exists() else []
    return [json.loads(line) for line in whole]


def table(outcomes: list[Outcome]) -> str:
    """What was done, how long it took, memory at its start and its end, and how it grew."""
    rows = [
        f"{'':10}{'count':>8}{'time [s]':>10}{'of':>10}{'RSS [MiB]':>16}{'slope [KiB each]':>18}{'bound':>7}  result"
    ]
    for outcome in outcomes:
        head = f"{outcome.name:10}{outcome.count:8}{outcome.seconds:10.0f}"
        for who, samples in outcome.memory.items():
            ends = f"{samples[0][1] / 2**20:.1f} - {samples[-1][1] / 2**20:.1f}" if samples else "never seen"
            grew = f"{slope(samples):18.3f}" if samples else f"{'':18}"
            rows.append(f"{head}{who:>10}{ends:>16}{grew}{BOUND[outcome.name]:7g}  {outcome.said}")
            head, outcome.said = f"{'':28}", ""
    return "\n".join(rows)


def main(argv: list[str] | None = None) -> int:
    words = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=words)
    parser.add_argument("what", nargs="*", choices=[*COUNTS, []], metavar="WHAT", help=f"of {', '.join(COUNTS)}; all")
    parser.add_argument("--count", type=int, help=f"of each; default {', '.join(map(str, COUNTS.values()))}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("-o", "--override", action="append", default=[], metavar="SECTION.KEY=VALUE")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)
    config, outcomes = load_recipe(RECIPE, args.override), []
    for name in args.what or COUNTS:
        count = args.count or COUNTS[name]
        if name == "steps":  # a process of its own, which reads the recipe itself
            outcome = steps(count, args.override)
        else:
            outcome = {"requests": requests, "syncs": syncs}[name](config, count, args.seed)
        outcome.check_memory()
        outcomes.append(outcome)
    print(table(outcomes))
    for outcome in outcomes:
        for problem in outcome.wrong[:5]:
            print(f"{outcome.name}: {problem}", file=sys.stderr)
    return int(any(outcome.wrong for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
