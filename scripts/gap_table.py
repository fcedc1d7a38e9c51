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
from tempfile import TemporaryDirectory
from typing import NamedTuple

from torch import Tensor

from minite.backends.registry import get_backend
from minite.config import PrecisionPlan, RunConfig, resolve_plan
from minite.config.schema import FormatConfig, PrecisionConfig, RuleConfig
from minite.diagnostics.gap import gap_summary
from minite.driver.gap.local import Pair, start_learner
from minite.driver.gap.measure import rollout
from minite.driver.gap.subject import open_subject
from minite.errors import UserError
from minite.formats import QTensor
from minite.learner import hf
from minite.models import get_model
from minite.sampler import make_engine
from minite.sync.convert import convert
from minite.sync.disk import sent_tensors
from minite.sync.export import Quantizer
from minite.sync.reconcile import share_outer
from minite.sync.stored import MODEL_DTYPES, to_parts
from minite.sync.transport import package

Side = tuple[str, str, str]  # weight, input, KV cache
BF16: Side = ("bf16", "bf16", "bf16")
W4A16: Side = ("nvfp4_1d", "bf16", "bf16")
W4A8: Side = ("nvfp4_1d", "mxfp8", "bf16")
TENSOR: Side = ("nvfp4_1d", "nvfp4_tensor", "bf16")
ROW: Side = ("nvfp4_1d", "nvfp4_row", "bf16")
FP8KV: Side = ("nvfp4_1d", "nvfp4_row", "fp8")


class Row(NamedTuple):
    """One line: what each side computes in, where the sampler's weights come from, and what the reports found."""

    title: str
    learner: Side
    sampler: Side
    alignment: str = "off"
    dense: str = ""  # the reports' gaps [nats]
    moe: str = ""
    source: str = "learner"  # of the sampler's weights: "learner" sends them | "files" of `minite convert` | "foreign"


ROWS = {
    "bf16": Row("BF16 / BF16", BF16, BF16, dense="0.0110", moe="0.0172"),
    "naive": Row("NVFP4 / NVFP4, naive (tensor-wide amax)", TENSOR, TENSOR, dense="0.1142", moe="0.0668"),
    "learner": Row("NVFP4 / BF16", TENSOR, BF16, dense="0.1376", moe="0.0621"),
    "sampler": Row("BF16 / NVFP4", BF16, TENSOR, dense="0.1690", moe="0.0747"),
    "w4a16": Row("W4A16", W4A16, W4A16, dense="0.0139", moe="0.0166"),
    "w4a8": Row("W4A8", W4A8, W4A8, dense="0.0363", moe="0.0227"),
    "w4a4": Row("W4A4 (row amax)", ROW, ROW, dense="0.0903", moe="0.0445"),
    "fp8kv": Row("W4A4, FP8 KV cache in the sampler", ROW, FP8KV, dense="0.0721 -> 0.0583 with BF16"),
    "offline": Row("W4A4, sampler from converted files", ROW, ROW, source="files"),
    "foreign": Row("W4A4, sampler from a converter that scales q, k, v apart", ROW, ROW, source="foreign"),
    "aligned": Row("W4A4, aligned", ROW, ROW, "aligned"),
    "strict": Row("W4A4, strict", ROW, ROW, "strict", "1e-8", "1e-8"),
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
    subject = open_subject(recipe, overrides, None, say)
    print("| learner / sampler | tokens | mean abs gap [nats] | p99 abs | p1 | reports, dense | reports, MoE |")
    print("|---|---|---|---|---|---|---|", flush=True)
    for name in names:
        row = ROWS[name]
        with engines(subject.config, row) as (pair, plan):
            subject.load(pair.worker)
            pair.sync()
            if row.source != "learner":
                sync_from_files(pair, plan, subject.config, row)
            batch = rollout(pair, subject.config, plan, subject.prompts, subject.stop_token)
            batch.old_logprob_T, _ = pair.worker.logprobs(batch)
            advantage_T = batch.advantage_S[batch.sequence_T]
            gap = gap_summary(batch.old_logprob_T, batch.sampler_logprob_T, advantage_T, batch.loss_mask_T)
        cells = f"{gap.tokens} | {gap.abs_mean:.1e} | {gap.abs_p99:.1e} | {gap.p01:.1e}"
        print(f"| {row.title} | {cells} | {row.dense} | {row.moe} |", flush=True)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def precision(base: PrecisionConfig, side: Side, alignment: str) -> PrecisionConfig:
    """The recipe's own choice of modules in other operands: what it quantizes keeps being quantized."""
    weight, operand, kv_cache = side
    if not base.formats:
        rules = (RuleConfig(use="low", match="model.layers.**"), RuleConfig(use="bf16", match="**"))
        base = replace(base, formats={"low": FormatConfig()}, rules=rules)
    formats = {name: replace(f, weight=weight, input=operand) for name, f in base.formats.items()}
    return replace(base, formats=formats, kv_cache=kv_cache, alignment=alignment)


@contextmanager
def engines(config: RunConfig, row: Row) -> Iterator[tuple[Pair, PrecisionPlan]]:
    """A learner of one plan, and a sampler of another, which is given too: it is the one that an export obeys."""
    mine = replace(config, precision=precision(config.precision, row.learner, row.alignment))
    theirs = replace(config, precision=precision(config.precision, row.sampler, row.alignment))
    plan = resolve_plan(theirs)
    with closing(start_learner(mine, resolve_plan(mine))) as worker, closing(make_engine(theirs, plan)) as engine:
        worker._policy.plan = plan  # read at export only, once the modules are bound
        yield Pair(worker, engine), plan


def sync_from_files(pair: Pair, plan: PrecisionPlan, config: RunConfig, row: Row) -> None:
    """The learner's weights once more, by way of files. Says whether their bytes are those that the learner sent."""
    online = pair.engine.weight_version()
    backend = get_backend("auto", device="cpu", strict=False)
    with TemporaryDirectory(prefix="minite-gap-") as folder:
        saved, converted = Path(folder) / "saved", Path(folder) / "converted"
        pair.worker.save_hf(saved)
        if row.source == "files":
            recipe = replace(config, precision=precision(config.precision, row.sampler, row.alignment))
            convert(saved, converted, recipe, backend)
            groups = ((name, {name: tensor}) for name, tensor in sent_tensors(converted))
        else:
            groups = scaled_apart(plan, saved, config, backend)
        sent, version = package(groups, 0, plan.digest)
    assert online is not None
    same = version.weight_digest == online.weight_digest
    say(f"{row.title}: {'the bytes' if same else 'other bytes than those'} that the learner sends")
    pair.load(sent, version)


def scaled_apart(
    plan: PrecisionPlan, saved: Path, config: RunConfig, backend: Quantizer
) -> Iterator[tuple[str, dict[str, Tensor]]]:
    """Every linear under an outer scale of its own, as a converter that knows no fused linears writes it; then what
    `minite convert --outer-scales shared` makes of such files, since one GEMM has one outer scale."""
    read = hf.reader(saved, config)
    held: dict[str, QTensor] = {}
    for name, shape in get_model(config.model.kind).hf_tensors(config.model).items():
        tensor = read(name, shape).to(MODEL_DTYPES[config.model.dtype])
        entry = plan.get(name.removesuffix(".weight"))
        if entry is None or entry.weight == "bf16":
            yield name, {name: tensor}
            continue
        group = plan.group_members(entry.group) if entry.group else (entry,)
        quantized = backend.quantize(tensor, entry.weight)
        assert isinstance(quantized, QTensor)
        held[entry.name] = quantized
        if all(e.name in held for e in group):
            shared, _ = share_outer({e.name: held.pop(e.name) for e in group})
            for module, q in shared.items():
                yield module, {f"{module}.{suffix}": part for suffix, part in to_parts(q).items()}


if __name__ == "__main__":
    main()
