"""The same measurement with one factor of the recipe changed at a time, everything else and the weights as they are."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from minite.config import RunConfig, resolve_plan
from minite.config.schema import RuleConfig
from minite.diagnostics.causes import Cause
from minite.driver.gap.local import start_learner
from minite.driver.gap.measure import gap_of
from minite.driver.gap.subject import Note, Subject
from minite.errors import UserError
from minite.types import GapSummary

Change = tuple[str, str, RunConfig]  # factor, what it becomes, the recipe with it

# An input of one outer scale per token and its tensor-wide twin.
_DOMAINS = {"nvfp4_row": "nvfp4_tensor", "nvfp4_tensor": "nvfp4_row"}


def attribute(subject: Subject, base: GapSummary, note: Note) -> tuple[Cause, ...]:
    """The gap as it is and under every change that this recipe leaves room for, from the same weights and prompts.

    Where a change breaks a promise of ``precision.alignment`` it is measured with alignment off, and says so.
    """
    found = [Cause("as it is", "", base)]
    with tempfile.TemporaryDirectory(prefix="minite-gap-") as folder:
        weights = _weights(subject, Path(folder) / "weights")
        for factor, change, config in changes(subject.config):
            config, change = allowed(config, change)
            note(f"{factor}: {change}")
            gap = gap_of(subject, config, resolve_plan(config), lambda worker: worker.load_hf(weights))
            found.append(Cause(factor, change, gap.summary))
    return tuple(found)


def _weights(subject: Subject, folder: Path) -> Path:
    """The subject's weights as a Hugging Face directory: a checkpoint is of one plan, these are of none."""
    worker = start_learner(subject.config, subject.plan)
    try:
        subject.load(worker)
        worker.save_hf(folder)
    finally:
        worker.close()
    return folder


def changes(config: RunConfig) -> Iterator[Change]:
    """Every factor in turn. One that the recipe does not have (experts in a dense model) is left out."""
    precision = config.precision
    yield from _operands(config, "weights", "weight")
    yield from _operands(config, "activations", "input")
    yield from _domain(config)
    other = "bf16" if precision.kv_cache == "fp8" else "fp8"
    yield "KV cache", other, _precise(config, kv_cache=other)
    if config.model.num_experts:
        on = not config.algo.router_replay
        yield "router replay", "on" if on else "off", replace(config, algo=replace(config.algo, router_replay=on))
    head = "bf16" if precision.lm_head_dtype == "fp32" else "fp32"
    yield "LM head", head, _precise(config, lm_head_dtype=head)
    yield from _attention(config)
    yield (
        "batch composition",
        "each response sampled alone",
        replace(config, sampler=replace(config.sampler, max_batch=1)),
    )
    strict = _precise(config, alignment="strict")
    if precision.alignment != "strict" and _refusal(strict) is None:
        yield "sum order", "strict", strict


def _operands(config: RunConfig, factor: str, field: str) -> Iterator[Change]:
    """All operands of one role in BF16."""
    formats = config.precision.formats
    if any(getattr(f, field) != "bf16" for f in formats.values()):
        plain = {name: replace(f, **{field: "bf16"}) for name, f in formats.items()}
        yield factor, "bf16", _precise(config, formats=plain)


def _domain(config: RunConfig) -> Iterator[Change]:
    formats = config.precision.formats
    if any(f.input in _DOMAINS for f in formats.values()):
        swapped = {name: replace(f, input=_DOMAINS.get(f.input, f.input)) for name, f in formats.items()}
        inputs = sorted({f.input for f in swapped.values() if f.input in _DOMAINS.values()})
        yield "outer scale of activations", ", ".join(inputs), _precise(config, formats=swapped)


def _attention(config: RunConfig) -> Iterator[Change]:
    """The linears around attention in BF16, where the plan has them quantized."""
    around = [e for e in resolve_plan(config).entries if ".self_attn." in e.name]
    if any(e.weight != "bf16" or e.input != "bf16" for e in around):
        rules = (RuleConfig(use="bf16", match="**.self_attn.*"), *config.precision.rules)
        yield "attention linears", "bf16", _precise(config, rules=rules)


def _precise(config: RunConfig, **changed: object) -> RunConfig:
    return replace(config, precision=replace(config.precision, **changed))  # type: ignore[arg-type]


def allowed(config: RunConfig, change: str) -> tuple[RunConfig, str]:
    """The recipe with alignment off where its own alignment refuses the change."""
    if _refusal(config) is None:
        return config, change
    return _precise(config, alignment="off"), f"{change} (alignment off)"


def _refusal(config: RunConfig) -> UserError | None:
    try:
        resolve_plan(config)
    except UserError as error:
        return error
    return None
