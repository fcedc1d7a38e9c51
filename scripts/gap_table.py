"""The gap tables of the public reports, in kind: one model, its weights, and both engines in every precision.

    python scripts/gap_table.py RECIPE [--rows bf16,w4a4,...] [-o section.key=value ...]

Each row samples the recipe's prompts with a sampler of one precision and recomputes them with a learner of another, in
one process. The reports' values (Qwen3-4B and Qwen3-30B-A3B) stand beside ours: what can be compared is the order.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path

from minite.config import RunConfig, resolve_plan
from minite.config.schema import FormatConfig, PrecisionConfig, RuleConfig
from minite.diagnostics.gap import gap_summary
from minite.driver.gap.local import Pair, start_learner
from minite.driver.gap.measure import rollout
from minite.driver.gap.subject import open_subject
from minite.errors import UserError
from minite.sampler import make_engine

BF16 = ("bf16", "bf16", "bf16")
TENSOR, ROW = ("nvfp4_1d", "nvfp4_tensor", "bf16"), ("nvfp4_1d", "nvfp4_row", "bf16")
Side = tuple[str, str, str]  # weight, input, KV cache

# name -> title, learner, sampler, alignment, the reports' dense and MoE values [nats]
ROWS: dict[str, tuple[str, Side, Side, str, str, str]] = {
    "bf16": ("BF16 / BF16", BF16, BF16, "off", "0.0110", "0.0172"),
    "naive": ("NVFP4 / NVFP4, naive (tensor-wide amax)", TENSOR, TENSOR, "off", "0.1142", "0.0668"),
    "learner": ("NVFP4 / BF16", TENSOR, BF16, "off", "0.1376", "0.0621"),
    "sampler": ("BF16 / NVFP4", BF16, TENSOR, "off", "0.1690", "0.0747"),
    "w4a16": ("W4A16", ("nvfp4_1d", "bf16", "bf16"), ("nvfp4_1d", "bf16", "bf16"), "off", "0.0139", "0.0166"),
    "w4a8": ("W4A8", ("nvfp4_1d", "mxfp8", "bf16"), ("nvfp4_1d", "mxfp8", "bf16"), "off", "0.0363", "0.0227"),
    "w4a4": ("W4A4 (row amax)", ROW, ROW, "off", "0.0903", "0.0445"),
    "fp8kv": ("W4A4, FP8 KV cache", ROW, ("nvfp4_1d", "nvfp4_row", "fp8"), "off", "0.0721 -> 0.0583", ""),
    "aligned": ("W4A4, aligned", ROW, ROW, "aligned", "", ""),
    "strict": ("W4A4, strict", ROW, ROW, "strict", "1e-8", "1e-8"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--rows", default=",".join(ROWS), help="of %(default)s")
    parser.add_argument("-o", dest="overrides", action="append", default=[], metavar="section.key=value")
    args = parser.parse_args()
    try:
        names = args.rows.split(",")
        if unknown := [name for name in names if name not in ROWS]:
            raise UserError(f"--rows: got {unknown[0]!r}, expected some of {', '.join(ROWS)}")
        show(args.recipe, names, args.overrides)
    except UserError as error:
        print(f"minite: error: {error}", file=sys.stderr)
        sys.exit(2)


def show(recipe: Path, names: list[str], overrides: list[str]) -> None:
    subject = open_subject(recipe, overrides, None, lambda line: print(line, file=sys.stderr, flush=True))
    print("| learner / sampler | tokens | mean abs gap [nats] | p99 abs | p1 | reports, dense | reports, MoE |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        title, learner, sampler, alignment, dense, moe = ROWS[name]
        with engines(subject.config, learner, sampler, alignment) as pair:
            subject.load(pair.worker)
            pair.sync()
            # The plan of the export is the sampler's, so the batch is of that plan too.
            batch = rollout(pair, subject.config, pair.worker._policy.plan, subject.prompts, subject.stop_token)
            batch.old_logprob_T, _ = pair.worker.logprobs(batch)
            advantage_T = batch.advantage_S[batch.sequence_T]
            gap = gap_summary(batch.old_logprob_T, batch.sampler_logprob_T, advantage_T, batch.loss_mask_T)
        cells = f"{gap.tokens} | {gap.abs_mean:.1e} | {gap.abs_p99:.1e} | {gap.p01:.1e}"
        print(f"| {title} | {cells} | {dense} | {moe} |", flush=True)


def precision(base: PrecisionConfig, side: Side, alignment: str) -> PrecisionConfig:
    """The recipe's own choice of modules in other operands: what it quantizes keeps being quantized."""
    weight, operand, kv_cache = side
    if not base.formats:
        rules = (RuleConfig(use="low", match="model.layers.**"), RuleConfig(use="bf16", match="**"))
        base = replace(base, formats={"low": FormatConfig()}, rules=rules)
    formats = {name: replace(f, weight=weight, input=operand) for name, f in base.formats.items()}
    return replace(base, formats=formats, kv_cache=kv_cache, alignment=alignment)


@contextmanager
def engines(config: RunConfig, learner: Side, sampler: Side, alignment: str) -> Iterator[Pair]:
    """A learner of one plan and a sampler of another; what is exported is quantized by the sampler's."""
    mine = replace(config, precision=precision(config.precision, learner, alignment))
    theirs = replace(config, precision=precision(config.precision, sampler, alignment))
    plan = resolve_plan(theirs)
    with closing(start_learner(mine, resolve_plan(mine))) as worker, closing(make_engine(theirs, plan)) as engine:
        worker._policy.plan = plan  # read at export only, once the modules are bound
        yield Pair(worker, engine)


if __name__ == "__main__":
    main()
