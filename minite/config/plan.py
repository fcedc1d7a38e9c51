"""The precision plan: what the rules decided for every linear. Everything else obeys it."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from minite.config.schema import ModelConfig
from minite.errors import UserError

NOT_NUMERIC = {"checkpoint", "init_std", "max_seq_len"}  # of ModelConfig: where weights start, and a bound


@dataclass(frozen=True)
class PlanEntry:
    """The decision for one linear."""

    name: str  # HF module path, e.g. "model.layers.0.mlp.experts.3.gate_proj"
    n: int  # rows of the unsharded weight [N, K]
    k: int
    format: str  # key of precision.formats, or "bf16"
    weight: str  # operand of config/operands.py
    input: str
    dgrad: str  # weight used by the input gradient: "bf16" = the original | "dequantized" | "nvfp4"
    wgrad: str  # input used by the weight gradient: likewise
    group: str | None  # fusion group, e.g. "model.layers.0.self_attn.qkv_proj"; members share one outer scale
    rule: str  # the deciding rule and where it stands, for people
    token_share: float = 1.0  # fraction of the tokens that pass through: experts_per_token / num_experts for an expert

    @property
    def quantized(self) -> bool:
        return self.weight != "bf16" or self.input != "bf16"


@dataclass(frozen=True)
class PrecisionPlan:
    """One entry per linear in model order, and the model-wide choices."""

    entries: tuple[PlanEntry, ...]
    model: dict[str, Any]  # the settings of ModelConfig that change a number
    kv_cache: str
    lm_head_dtype: str
    alignment: str
    backend: str  # as the recipe asks: "auto" or a backend's name
    digest: str  # of all that changes a number, but for what "auto" takes on a machine: checkpoints keep that

    @cached_property
    def _by_name(self) -> dict[str, PlanEntry]:
        return {entry.name: entry for entry in self.entries}

    @cached_property
    def _by_group(self) -> dict[str, tuple[PlanEntry, ...]]:
        groups: dict[str, list[PlanEntry]] = {}
        for entry in self.entries:
            if entry.group is not None:
                groups.setdefault(entry.group, []).append(entry)
        return {group: tuple(members) for group, members in groups.items()}

    def __getitem__(self, name: str) -> PlanEntry:
        """The entry of a module. Raises KeyError when the plan has none."""
        return self._by_name[name]

    def get(self, name: str) -> PlanEntry | None:
        return self._by_name.get(name)

    def __iter__(self) -> Iterator[PlanEntry]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def group_members(self, group: str) -> tuple[PlanEntry, ...]:
        """The entries that share the group's outer scale, in model order. Raises KeyError for an unknown group."""
        return self._by_group[group]

    def table(self) -> str:
        """The plan as text: equal decisions over ranges of layers and experts on one line."""
        from minite.config.plan_table import render  # it reads plans, so it cannot be imported above

        return render(self)

    def to_json(self) -> str:
        """The whole plan as JSON text, rules written once. The inverse of from_json."""
        rules = list(dict.fromkeys(entry.rule for entry in self.entries))
        number = {rule: i for i, rule in enumerate(rules)}
        modules = [{**vars(entry), "rule": number[entry.rule]} for entry in self.entries]
        head = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "entries"}
        lines = ",\n".join("  " + json.dumps(module) for module in modules)
        return json.dumps({**head, "rules": rules}, indent=1)[:-2] + f',\n "modules": [\n{lines}\n ]\n}}\n'

    @staticmethod
    def from_json(text: str, source: str = "plan.json") -> PrecisionPlan:
        """Read what to_json wrote; ``source`` stands in messages.

        Raises UserError when it is damaged or its digest is not that of its content.
        """
        try:
            data = json.loads(text)
            rules = data.pop("rules")
            entries = tuple(PlanEntry(**{**module, "rule": rules[module["rule"]]}) for module in data.pop("modules"))
            plan = PrecisionPlan(entries=entries, **data)
            digest = plan_digest(plan)
        except (ValueError, KeyError, IndexError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"{source}: not a precision plan ({error}); remake it with: minite plan --json") from None
        if digest != plan.digest:
            raise UserError(f"{source}: its digest does not fit its content; remake it with: minite plan --json")
        return plan


def make_plan(
    entries: tuple[PlanEntry, ...],
    model: ModelConfig,
    *,
    kv_cache: str,
    lm_head_dtype: str,
    alignment: str,
    backend: str,
) -> PrecisionPlan:
    """A plan with its digest filled in."""
    numbers = {name: value for name, value in vars(model).items() if name not in NOT_NUMERIC}
    draft = PrecisionPlan(entries, numbers, kv_cache, lm_head_dtype, alignment, backend, digest="")
    return dataclasses.replace(draft, digest=plan_digest(draft))


def plan_digest(plan: PrecisionPlan) -> str:
    """SHA-256 over what changes a number: the model, shapes, operands, groups and the model-wide choices.

    The names of formats and the rules are left out: two recipes that decide alike have equal digests.
    """
    model = sorted(plan.model.items())
    digest = hashlib.sha256(repr((model, plan.kv_cache, plan.lm_head_dtype, plan.alignment, plan.backend)).encode())
    for e in plan.entries:
        group = e.group if e.quantized else None  # only quantized members share a scale
        digest.update(repr((e.name, e.n, e.k, e.weight, e.input, e.dgrad, e.wgrad, group)).encode())
    return digest.hexdigest()
