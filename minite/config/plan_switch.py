"""Another plan for a run in progress: a group of modules to W4A16."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from minite.config.build import nearest
from minite.config.match import compile_pattern
from minite.config.plan import PlanEntry, PrecisionPlan, make_plan
from minite.config.plan_checks import check_groups
from minite.config.rules import numberless
from minite.config.schema import RunConfig
from minite.errors import UserError
from minite.models import get_model


def with_bf16_inputs(config: RunConfig, plan: PrecisionPlan, patterns: Sequence[str]) -> PrecisionPlan:
    """The plan after every quantized linear that one of ``monitor.switch``'s patterns matches takes its input in BF16.

    Weights stay as they are, so W4A4 becomes W4A16. The result has a digest of its own. Raises UserError for a pattern
    that matches nothing with a quantized input, or only a part of what is computed in one GEMM.
    """
    if not patterns:
        return plan
    entries = list(plan.entries)
    for pattern in patterns:
        try:
            matcher = compile_pattern(pattern)
        except ValueError as error:
            raise UserError(f"{config.where('monitor.switch')}: {error} is not a whole segment") from None
        chosen = [i for i, e in enumerate(entries) if e.input != "bf16" and matcher.fullmatch(e.name + ".")]
        if not chosen:
            names = dict.fromkeys(numberless(e.name) for e in entries if e.input != "bf16")
            raise UserError(
                f"{config.where('monitor.switch')}: monitor.switch: {pattern!r} matches no linear whose input is "
                f"quantized; {nearest(pattern, names)}"
            )
        for i in chosen:
            entries[i] = _bf16_input(entries[i], pattern)
    changed = make_plan(
        tuple(entries),
        config.model,
        kv_cache=plan.kv_cache,
        lm_head_dtype=plan.lm_head_dtype,
        alignment=plan.alignment,
        backend=plan.backend,
    )
    check_groups(changed, get_model(config.model.kind))
    return changed


def _bf16_input(entry: PlanEntry, pattern: str) -> PlanEntry:
    return dataclasses.replace(
        entry,
        format=f"{entry.format}_a16",
        input="bf16",
        wgrad="bf16",  # the input as it is: there is no quantized one any more
        rule=f"{entry.rule}; monitor.switch {pattern}: input bf16",
    )
