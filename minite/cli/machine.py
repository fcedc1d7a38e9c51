"""The commands about this machine: `minite doctor`, `minite bench`."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path

from minite.cli.arguments import Command, add_override, positive
from minite.errors import UserError

_GPU_BENCHES = ("kernels", "gemm", "moe", "layer", "sync", "serve")
_READS = {  # bench -> options it reads; what is given beyond them is a mistake
    "step": ("recipe", "turns", "json"),
    "quantize": ("turns", "json"),
    "sampler": ("recipe", "turns", "tokens", "json"),
    "watch": ("recipe", "turns", "tokens", "json"),
    "learner": ("recipe", "model", "gpu", "tokens", "sequence"),
    **dict.fromkeys(_GPU_BENCHES, ("json",)),
}
_TURNS, _GPU, _TOKENS, _SEQUENCE = 5, "b300", 131072, 4096  # where an option is not given


def doctor(args: argparse.Namespace) -> int:
    """Say what this machine can run, and check its numbers. Exit code 1 when a check fails."""
    from minite.backends.doctor import examine

    text, healthy = examine()
    print(text)
    if args.self_test:
        from minite.backends.cutlass.selftest import self_test

        text, native = self_test()
        print(text)
        healthy = healthy and native
    return 0 if healthy else 1


def bench(args: argparse.Namespace) -> int:
    """Measure this machine: W4A4 against BF16, or the quantizers against a copy. Or reckon what a GPU could reach."""
    runs = {
        "step": _bench_step, "quantize": _bench_quantize, "sampler": _bench_sampler, "watch": _bench_watch,
        "learner": _bench_learner,
    }  # fmt: skip
    reads = _READS[args.what]
    if "recipe" not in reads and (args.recipe is not None or args.override):
        raise UserError(f"bench {args.what}: got a recipe or -o, which it does not read; leave them out")
    for option in ("turns", "json", "model", "gpu", "tokens", "sequence"):
        if option not in reads and getattr(args, option) is not None:
            raise UserError(f"bench {args.what}: got --{option}, which it does not read; leave it out")
    return runs.get(args.what, _bench_gpu)(args)


def _bench_step(args: argparse.Namespace) -> int:
    from minite.backends.bench import SHAPES_MNK, measure, table
    from minite.config import load_recipe
    from minite.config.load import shipped
    from minite.driver.bench import measure_steps, step_table

    recipe = args.recipe or shipped("tiny_qwen3_moe_w4a4_grpo.yaml")
    times = measure_steps(load_recipe(recipe, args.override), args.turns or _TURNS)
    print(step_table(times))
    print()
    rows = [measure(shape) for shape in SHAPES_MNK]
    print(table(rows))
    _write(args.json, {"step": dataclasses.asdict(times), "forward": [dataclasses.asdict(row) for row in rows]})
    return 0


def _bench_quantize(args: argparse.Namespace) -> int:
    from minite.backends.bench_quantize import machine, measure, table

    where = machine()
    print(where)
    rates = measure(turns=args.turns or _TURNS)
    print(table(rates))
    _write(args.json, {"machine": where, "quantize": [dataclasses.asdict(rate) for rate in rates]})
    return 0


def _bench_sampler(args: argparse.Namespace) -> int:
    from minite.config import load_recipe
    from minite.config.load import shipped
    from minite.sampler.bench import measure, table

    config = load_recipe(args.recipe or shipped("tiny_qwen3_moe_w4a4_grpo.yaml"), args.override)
    rows = measure(config, args.turns or _TURNS, args.tokens)
    print(table(rows, config))
    _write(args.json, {"sampler": rows})
    return 0


def _bench_watch(args: argparse.Namespace) -> int:
    from minite.config import load_recipe
    from minite.config.load import shipped
    from minite.driver.bench_watch import measure_watch, watch_table

    config = load_recipe(args.recipe or shipped("tiny_qwen3_moe_w4a4_grpo.yaml"), args.override)
    times = measure_watch(config, args.turns or _TURNS, args.tokens)
    print(watch_table(times))
    _write(args.json, {"watch": dataclasses.asdict(times)})
    return 0


def _bench_gpu(args: argparse.Namespace) -> int:
    import torch

    from minite.backends.registry import get_backend

    get_backend("triton", device="cuda", strict=False)  # or a UserError that says what is missing
    from minite.backends.triton.bench import BENCHES, card, table
    from minite.layers import bench as layer
    from minite.sampler.embedded import bench_serve as serve

    print(card())
    torch.manual_seed(0)
    rows = {**BENCHES, "layer": layer.measure, "serve": serve.measure}[args.what]()
    print(table(rows))
    _write(args.json, {"card": card(), args.what: rows})
    return 0


def _bench_learner(args: argparse.Namespace) -> int:
    from minite.config import load_recipe, resolve_plan
    from minite.config.load import shipped
    from minite.driver.roofline import table

    if args.recipe is not None and args.model is not None:
        raise UserError("bench learner: got a recipe and --model; give one of them")
    name = (args.model or "qwen3-30b-a3b").lower().replace("-", "_")
    config = load_recipe(args.recipe or shipped(f"{name}_w4a4_grpo.yaml"), args.override)
    entries = resolve_plan(config).entries
    print(table(config.model, entries, args.tokens or _TOKENS, args.sequence or _SEQUENCE, args.gpu or _GPU))
    return 0


def _write(path: Path | None, figures: object) -> None:
    if path is not None:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


def add(command: Command) -> None:
    """Adds this file's commands."""
    examined = command(doctor, "", "--self-test")
    examined.add_argument(
        "--self-test", action="store_true", help="also run every native kernel against the reference, with its speed"
    )
    added = command(
        bench,
        "step",
        "step recipes/tiny_qwen3_moe_w4a8_grpo.yaml --turns 9 -o algo.prompts_per_step=32",
        "quantize --json rates.json",
        "sampler -o sampler=sglang --turns 3",
        "watch recipes/qwen3_4b_w4a4_grpo.yaml --tokens 1024",
        "gemm --json gemm.json",
        "learner --model qwen3-30b-a3b --gpu b300",
    )
    added.add_argument(
        "what",
        choices=("step", "quantize", "sampler", "watch", *_GPU_BENCHES, "learner"),
        help="step: a training step of a recipe and of its BF16 twin by phase, and forward passes of one linear; "
        "quantize: GB/s of the NVFP4 quantizers of a CPU beside a copy, one thread; "
        "sampler: fixed-output serving by a recipe's sampler, whichever it is, with random weights, beside BF16; "
        "watch: gap, correction and monitor of a step on a made-up rollout of the recipe's size; "
        "on a GPU, at the shapes of Qwen3-30B-A3B: kernels (its quantizers, beside a copy), gemm (experts' GEMMs by "
        "tokens), moe and layer (whole), sync (conversion of all experts), serve (a decode step, and "
        "1,024 generated tokens a request); "
        "learner: the roofline of one update on a GPU that need not be here, from shapes alone",
    )
    added.add_argument("recipe", nargs="?", metavar="RECIPE", help="recipe file (default: the tiny W4A4 recipe)")
    added.add_argument("--turns", type=positive, metavar="N", help=f"runs of each that count (default: {_TURNS})")
    added.add_argument("--json", type=Path, metavar="FILE", help="also write the figures there")
    added.add_argument(
        "--model", metavar="NAME", help="learner: the model of a shipped recipe (default: qwen3-30b-a3b)"
    )
    added.add_argument("--gpu", metavar="NAME", help=f"learner: h200, b200 or b300 (default: {_GPU})")
    added.add_argument(
        "--tokens",
        type=positive,
        metavar="N",
        help=f"learner: of an update (default: {_TOKENS}); sampler, watch: of a response",
    )
    added.add_argument("--sequence", type=positive, metavar="N", help=f"learner: of a sequence (default: {_SEQUENCE})")
    add_override(added)
