"""RunConfig -> PrecisionPlan."""

from __future__ import annotations

from minite.config.plan import PlanEntry, PrecisionPlan, make_plan
from minite.config.plan_checks import (
    check_alignment,
    check_backend_shapes,
    check_formats,
    check_fused,
    check_groups,
    check_high_precision,
    check_shapes,
)
from minite.config.rules import decide, fusion_groups, rule_text
from minite.config.schema import FormatConfig, RunConfig
from minite.models import get_model


def resolve_plan(run_config: RunConfig) -> PrecisionPlan:
    """Decide every linear of the model. Needs no weights and no torch.

    Raises UserError for a rule that decides nothing, a module that no rule covers, an unknown format or operand, a
    shape that a format or the backend cannot take, a fusion group of mixed formats, a quantized router or lm_head, and
    choices that contradict ``precision.alignment``.
    """
    precision, model = run_config.precision, run_config.model
    family = get_model(model.kind)
    linears = family.linears(model)
    names = [name for name, _, _ in linears]
    check_formats(run_config)
    rule_of = decide(run_config, names)
    group_of = fusion_groups(run_config, names)
    check_fused(run_config, family, group_of)

    formats = {"bf16": FormatConfig(), **precision.formats}
    texts = [rule_text(run_config, i) for i in range(len(precision.rules))]
    entries: list[PlanEntry] = []
    for name, n, k in linears:
        use = precision.rules[rule_of[name]].use
        fmt = formats[use]
        entries.append(
            PlanEntry(
                name=name,
                n=n,
                k=k,
                format=use,
                weight=fmt.weight,
                input=fmt.input,
                dgrad=fmt.dgrad,
                wgrad=fmt.wgrad,
                group=group_of.get(name),
                rule=texts[rule_of[name]],
                token_share=family.token_share(model, name),
            )
        )
    plan = make_plan(
        tuple(entries),
        model,
        kv_cache=precision.kv_cache,
        lm_head_dtype=precision.lm_head_dtype,
        alignment=precision.alignment,
        backend=precision.backend,
    )
    check_high_precision(plan, family)
    check_shapes(run_config, plan, family)
    check_backend_shapes(run_config, plan, family, plan.backend)
    check_groups(plan, family)
    check_alignment(run_config, plan)
    return plan
