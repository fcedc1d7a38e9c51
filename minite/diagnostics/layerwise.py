"""Two engines on the same tokens, operation by operation: the first that turns equal inputs into other outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from minite.diagnostics.gap_text import columns
from minite.errors import UserError

Parameter = Tensor | float | str


@dataclass
class Observed:
    """One operation of one engine, by token. Values of tokens that did not pass it are undefined (see ``seen_T``)."""

    module: str  # e.g. model.layers.1.mlp.experts.down_proj
    kind: str  # what is to blame when nothing finer differs: "GEMM", "norm", "RoPE", "attention", ...
    seen_T: Tensor  # bool [T]
    inputs: dict[str, Tensor] = field(default_factory=dict)  # [T, ...]
    internals: dict[str, Tensor] = field(default_factory=dict)  # [T, ...], in the order they are computed
    outputs: dict[str, Tensor] = field(default_factory=dict)  # [T, ...]
    parameters: dict[str, Parameter] = field(default_factory=dict)  # the same for every token: weights, eps, formats
    # Inputs of which a token also reads the values of all tokens before it in its sequence.
    context: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """One operation of both engines compared. Tokens with equal inputs are those whose context is equal too."""

    module: str
    tokens: int  # that passed it in both engines
    equal_inputs: int
    parted: int  # equal inputs, other outputs
    max_difference: float  # over those, in units of the output
    differs: tuple[str, ...]  # what differs in it, the first cause first; empty where nothing does
    equal_codes: int | None = None  # tokens with equal inputs whose quantized inputs are equal too; None: not quantized
    joined: int = 0  # tokens equal in everything before, whose inputs differ: what lies between two operations


@dataclass(frozen=True)
class LayerReport:
    """All operations in order, and the one to look at."""

    responses: int
    tokens: int
    findings: tuple[Finding, ...]
    first: str | None  # module of the first operation that parts the engines; None: there is none
    cause: str  # what differs there, in words


def compare(learner: Sequence[Observed], sampler: Sequence[Observed], cu_seqlens_S1: Tensor) -> LayerReport:
    """Compare operation by operation, in the order of the traces. Values are compared bit by bit (NaN equals NaN).

    cu_seqlens_S1: offsets of the sequences in the token axis of both traces. Raises UserError for traces of different
    models.
    """
    if [o.module for o in learner] != [o.module for o in sampler]:
        raise UserError("layers: learner and sampler went through different operations; they must hold one model")
    tokens = int(cu_seqlens_S1[-1])
    equal_T = torch.ones(tokens, dtype=torch.bool)  # in every output so far
    findings = []
    for ours, theirs in zip(learner, sampler, strict=True):
        seen_T = ours.seen_T & theirs.seen_T
        own_T = _equal(ours.inputs, theirs.inputs, tokens)
        inputs_T = own_T & _context_equal(ours, theirs, cu_seqlens_S1, seen_T)
        outputs_T = _equal(ours.outputs, theirs.outputs, tokens)
        parted_T = seen_T & inputs_T & ~outputs_T
        joined = int((seen_T & equal_T & ~own_T).sum())
        findings.append(
            Finding(
                ours.module,
                int(seen_T.sum()),
                int((seen_T & inputs_T).sum()),
                int(parted_T.sum()),
                _max_difference(ours.outputs, theirs.outputs, parted_T),
                tuple(_differs(ours, theirs, parted_T)),
                _equal_codes(ours, theirs, seen_T & inputs_T),
                joined,
            )
        )
        equal_T &= ~seen_T | (own_T & outputs_T)
    first, cause = _first(findings)
    return LayerReport(len(cu_seqlens_S1) - 1, tokens, tuple(findings), first, cause)


def _equal_codes(ours: Observed, theirs: Observed, at_T: Tensor) -> int | None:
    if not any("codes" in name for name in ours.internals):
        return None
    if ours.internals.keys() != theirs.internals.keys():
        return 0
    return int((_equal(ours.internals, theirs.internals, len(at_T)) & at_T).sum())


def _first(findings: Sequence[Finding]) -> tuple[str | None, str]:
    for f in findings:
        if f.joined:
            return f.module, f"its inputs differ for {f.joined} tokens equal so far: residual addition or embedding"
        if f.parted:
            share = f"{f.parted} of {f.equal_inputs} tokens with equal inputs"
            return f.module, f"{f.differs[0]} ({share}, largest difference {f.max_difference:.3g})"
    for f in findings:
        if f.differs:
            return f.module, f"{f.differs[0]} (no token of these shows it)"
    return None, "every operation gave equal outputs for equal inputs"


def _equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], tokens: int) -> Tensor:
    """bool [T]: tokens whose values are the same in all of the named tensors."""
    same_T = torch.ones(tokens, dtype=torch.bool)
    for name, mine in ours.items():
        same_T &= _same_rows(mine, theirs[name])
    return same_T


def _same_rows(a: Tensor, b: Tensor) -> Tensor:
    if a.shape != b.shape:
        return torch.zeros(len(a), dtype=torch.bool)
    same = a == b
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
    return same.flatten(1).all(dim=1) if a.ndim > 1 else same


def _context_equal(ours: Observed, theirs: Observed, cu_seqlens_S1: Tensor, seen_T: Tensor) -> Tensor:
    """bool [T]: no token up to this one in its sequence differs in the inputs that a token reads of others."""
    tokens = int(cu_seqlens_S1[-1])
    if not ours.context:
        return torch.ones(tokens, dtype=torch.bool)
    wrong_T = (seen_T & ~_equal({n: ours.inputs[n] for n in ours.context}, theirs.inputs, tokens)).int()
    before_T = wrong_T.cumsum(0) - wrong_T
    start_T = before_T[cu_seqlens_S1[:-1]].repeat_interleave(cu_seqlens_S1.diff())
    return before_T + wrong_T == start_T


def _max_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor], at_T: Tensor) -> float:
    if not bool(at_T.any()):
        return 0.0
    largest = [
        (a[at_T].double() - theirs[name][at_T].double()).abs().max()
        for name, a in ours.items()
        if a.shape == theirs[name].shape
    ]
    return max(map(float, largest), default=float("nan"))


def _differs(ours: Observed, theirs: Observed, parted_T: Tensor) -> list[str]:
    """What is not the same: parameters; where tokens part, internals; and when all of these are equal, the rest."""
    names = dict.fromkeys((*ours.parameters, *theirs.parameters))
    found = [text for n in names if (text := _differing(n, ours.parameters.get(n), theirs.parameters.get(n)))]
    if not bool(parted_T.any()):
        return found
    for name in dict.fromkeys((*ours.internals, *theirs.internals)):
        a, b = ours.internals.get(name), theirs.internals.get(name)
        if a is None or b is None or bool((~_same_rows(a, b) & parted_T).any()):
            found.append(name)
    if found:
        return found
    parted = [n for n, a in ours.outputs.items() if bool((~_same_rows(a, theirs.outputs[n]) & parted_T).any())]
    return [ours.kind if len(ours.outputs) == 1 else f"{ours.kind}: {name}" for name in parted]


def _differing(name: str, mine: Parameter | None, other: Parameter | None) -> str | None:
    """How a parameter differs, in words; None where it does not."""
    if mine is None or other is None:
        return f"{name}: in the {'sampler' if mine is None else 'learner'} only"
    if isinstance(mine, Tensor) and isinstance(other, Tensor):
        if mine.shape == other.shape:
            return None if torch.equal(mine, other) else name + _where(mine, other)
        mine, other = f"shape {list(mine.shape)}", f"{list(other.shape)}"
    return None if mine == other else f"{name}: {mine} in the learner, {other} in the sampler"


def _where(a: Tensor, b: Tensor) -> str:
    """Which experts differ, for what is stacked by expert, and how many elements."""
    differs = a != b
    count = f"{int(differs.sum())} of {a.numel()} {'values' if a.is_floating_point() else 'rows'}"
    if a.ndim != 2:
        return f" ({count})"
    experts = differs.any(dim=1).nonzero().squeeze(-1).tolist()
    listed = ", ".join(map(str, experts[:8])) + (" ..." if len(experts) > 8 else "")
    return f" (expert{'s' * (len(experts) > 1)} {listed}: {count})"


HEAD = ["operation", "tokens", "equal inputs", "parted", "largest", "what differs"]


def verdict(report: LayerReport) -> list[str]:
    """The answer in one or two sentences."""
    if report.first is None:
        return [f"no operation parts the engines: {report.cause}"]
    return [f"first operation that parts the engines: {report.first}", f"what differs in it: {report.cause}"]


def layer_rows(report: LayerReport) -> list[list[str]]:
    """Texts of the operations where something differs."""
    return [
        [f.module, str(f.tokens), str(f.equal_inputs), str(f.parted), f"{f.max_difference:.2e}", "; ".join(f.differs)]
        for f in report.findings
        if f.parted or f.differs
    ]


def layer_table(report: LayerReport) -> str:
    """The verdict, and the operations where something differs."""
    size = f"layers: {report.tokens} tokens of {report.responses} responses, {len(report.findings)} operations"
    coded = [f for f in report.findings if f.equal_codes is not None]
    if coded:
        equal = sum(f.equal_codes == f.equal_inputs for f in coded)
        pairs = sum(f.equal_inputs for f in coded)
        size += f"\ncodes and scales of equal inputs: equal in {equal} of {len(coded)} GEMMs ({pairs} rows compared)"
    rows = layer_rows(report)
    return "\n".join([size, *verdict(report), *(["", *columns(HEAD, rows, texts=2)] if rows else [])])
