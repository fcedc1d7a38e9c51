"""Which linears a plan loses most by: a text scored with one group of them quantized, and with all but that group.

A group is what one GEMM computes (q, k and v; gate and up; an expert of all) in a run of layers.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from minite.config import PlanEntry, RunConfig, resolve_plan
from minite.config.plan_table import ranges
from minite.config.rules import numberless, without_dead_rules
from minite.config.schema import RuleConfig
from minite.errors import UserError
from minite.evaluation.compare import paired_difference
from minite.evaluation.outcome import Outcome, Tell
from minite.evaluation.subject import load
from minite.evaluation.text import score

_BF16 = RuleConfig(use="bf16", match="**")


@dataclass(frozen=True)
class Group:
    """Linears that are quantized, or not, together."""

    modules: tuple[str, ...]  # names with * for every number
    layers: tuple[int, ...]
    format: str  # of precision.formats
    weights: int


Quantized = frozenset[Group]


@dataclass(frozen=True)
class Measured:
    """Nats per token by which groups are quantized; each choice is scored once, when first asked for."""

    config: RunConfig
    groups: tuple[Group, ...]
    score: Callable[[Quantized], Outcome]

    @property
    def all(self) -> Quantized:
        return frozenset(self.groups)

    def cost(self, quantized: Quantized, than: Quantized = frozenset()) -> tuple[float, tuple[float, float]]:
        """Nats per token more than with ``than`` quantized, and the 95 % interval over windows."""
        return paired_difference(self.score(quantized).value_N, self.score(than).value_N)

    def saves(self, group: Group) -> float:
        """Nats per token that the plan would lose less with this group in BF16."""
        return self.cost(self.all, self.all - {group})[0]


def measure(checkpoint: Path, config: RunConfig, windows: int, parts: int, tell: Tell) -> Measured:
    """Ready to score the checkpoint with any groups quantized. A score loads the model anew: one is in memory."""
    groups = groups_of(config, parts)

    @functools.cache
    def scored(quantized: Quantized) -> Outcome:
        rules = [RuleConfig(g.format, module, g.layers) for g in groups if g in quantized for module in g.modules]
        outcome = score(load(checkpoint, _with_rules(config, (*rules, _BF16))), lambda line: None, windows)
        tell(f"{len(quantized)} of {len(groups)} groups quantized: {outcome.mean:.4f} nats/token")
        return outcome

    return Measured(config, groups, scored)


def groups_of(config: RunConfig, parts: int) -> tuple[Group, ...]:
    """The groups of a recipe, each kind of linear cut into ``parts`` runs of layers. UserError without any."""
    kinds: dict[tuple[str, str], list[PlanEntry]] = {}
    for entry in resolve_plan(config):
        if entry.quantized:
            kinds.setdefault((numberless(entry.group or entry.name), entry.format), []).append(entry)
    groups = []
    for (_, form), entries in kinds.items():
        layers = sorted({_layer(entry) for entry in entries})
        for i in range(parts):
            part = tuple(layers[i * len(layers) // parts : (i + 1) * len(layers) // parts])
            members = [entry for entry in entries if _layer(entry) in part]
            if members:
                modules = tuple(dict.fromkeys(numberless(entry.name) for entry in members))
                groups.append(Group(modules, part, form, sum(entry.n * entry.k for entry in members)))
    if not groups:
        raise UserError(f"{config.name}: its plan quantizes no linear; expected a recipe that quantizes some")
    return tuple(groups)


def keep(measured: Measured, budget: float) -> Quantized:
    """Groups to keep in BF16 so that the rest, scored together, costs at most ``budget`` [nats/token].

    Those are taken first that save most per weight. UserError for a budget below 0 that no choice meets.
    """
    kept: Quantized = frozenset()
    order = iter(sorted(measured.groups, key=lambda group: -measured.saves(group) / group.weights))
    while measured.cost(measured.all - kept)[0] > budget:
        group = next(order, None)
        if group is None:
            raise UserError(f"--budget {budget:g}: not met with every linear in BF16; expected 0 or more")
        kept |= {group}
    return kept


def table(measured: Measured) -> str:
    """Markdown, the group that costs most on top."""
    total = sum(group.weights for group in measured.groups)
    lines = [
        f"{measured.config.name}: {_cell(measured.cost(measured.all))} nats/token over BF16 [95 %]; "
        f"{measured.score(measured.all).about}\n",
        "| linears | layers | of the quantized weights | in BF16 saves [95 %] | alone costs [95 %] |",
        "|---|---|---|---|---|",
    ]
    for group in sorted(measured.groups, key=lambda group: -measured.saves(group)):
        leaves = ", ".join(module.rpartition(".")[2].removesuffix("_proj") for module in group.modules)
        layers = ranges("0", [(layer,) for layer in group.layers])
        saves = _cell(measured.cost(measured.all, measured.all - {group}))
        alone = _cell(measured.cost(frozenset({group})))
        lines.append(f"| {leaves} | {layers} | {group.weights / total:.1%} | {saves} | {alone} |")
    return "\n".join(lines)


def recipe_rules(measured: Measured, kept: Quantized) -> str:
    """precision.rules of the recipe with these groups in BF16, as YAML, and what that costs."""
    config, everywhere = measured.config, _layers_by_module(measured.groups)
    added = [
        RuleConfig("bf16", module, None if layers == everywhere[module] else tuple(sorted(layers)))
        for module, layers in _layers_by_module(group for group in measured.groups if group in kept).items()
    ]
    names = [entry.name for entry in resolve_plan(config)]
    mixed = without_dead_rules(_with_rules(config, (*added, *config.precision.rules)), names)
    share = 1 - sum(group.weights for group in kept) / sum(group.weights for group in measured.groups)
    cost = _cell(measured.cost(measured.all - kept))
    head = f"# {cost} nats/token over BF16; {share:.1%} of the weights that {config.name} quantizes stay so"
    return "\n".join([head, "precision:", "  rules:", *(f"    - {_yaml(rule)}" for rule in mixed)])


def _layers_by_module(groups: Iterable[Group]) -> dict[str, set[int]]:
    layers: dict[str, set[int]] = {}
    for group in groups:
        for module in group.modules:
            layers.setdefault(module, set()).update(group.layers)
    return layers


def _with_rules(config: RunConfig, rules: tuple[RuleConfig, ...]) -> RunConfig:
    return dataclasses.replace(config, precision=dataclasses.replace(config.precision, rules=rules))


def _layer(entry: PlanEntry) -> int:
    return int(entry.name.split(".")[2])  # model.layers.N: lm_head is never quantized


def _cell(figure: tuple[float, tuple[float, float]]) -> str:
    return f"{figure[0]:+.4f} [{figure[1][0]:+.4f}, {figure[1][1]:+.4f}]"


def _yaml(rule: RuleConfig) -> str:
    parts = [] if rule.match is None else [f'match: "{rule.match}"']
    parts += [] if rule.layers is None else [f"layers: {list(rule.layers)}"]
    return "{" + ", ".join([*parts, f"use: {rule.use}"]) + "}"
