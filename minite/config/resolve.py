"""RunConfig -> PrecisionPlan: which rule decides which linear, and whether the result can be computed.

Each check is one function; all raise UserError with the file and line of the rule or format to mend.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from minite.config.build import nearest
from minite.config.match import compile_pattern
from minite.config.operands import OPERANDS
from minite.config.plan import PlanEntry, PrecisionPlan, make_plan
from minite.config.schema import FormatConfig, RuleConfig, RunConfig
from minite.errors import UserError
from minite.models import ModelFamily, get_model

_LAYER = re.compile(r"model\.layers\.(\d+)\.")


def resolve_plan(run_config: RunConfig) -> PrecisionPlan:
    """Decide every linear of the model. Needs no weights and no torch.

    Raises UserError for a rule that decides nothing, a module that no rule covers, an unknown format or operand, a
    shape that a format cannot take, a fusion group of mixed formats, a quantized router or lm_head, and choices that
    contradict ``precision.alignment``.
    """
    precision, family = run_config.precision, get_model(run_config.model.kind)
    formats = {"bf16": FormatConfig(), **precision.formats}
    check_formats(run_config)
    linears = family.linears(run_config.model)
    names = [name for name, _, _ in linears]
    deciding = decide(run_config, names)
    groups = fusion_groups(run_config, names)
    texts = [_rule_text(run_config, i) for i in range(len(precision.rules))]
    entries = []
    for name, n, k in linears:
        i = deciding[name]
        fmt = formats[precision.rules[i].use]
        entries.append(
            PlanEntry(
                name=name,
                n=n,
                k=k,
                format=precision.rules[i].use,
                weight=fmt.weight,
                input=fmt.input,
                dgrad=fmt.dgrad,
                wgrad=fmt.wgrad,
                group=groups.get(name),
                rule=texts[i],
                token_share=family.token_share(run_config.model, name),
            )
        )
    plan = make_plan(
        tuple(entries),
        kv_cache=precision.kv_cache,
        lm_head_dtype=precision.lm_head_dtype,
        alignment=precision.alignment,
        backend=precision.backend,
    )
    check_high_precision(plan, family)
    check_shapes(run_config, plan)
    check_groups(plan, family)
    check_alignment(run_config, plan)
    return plan


def check_formats(config: RunConfig) -> None:
    """Every format uses known operands in roles they can play; "bf16" is not redefined."""
    for name, fmt in config.precision.formats.items():
        path = f"precision.formats.{name}"
        if name == "bf16":
            raise UserError(f"{config.where(path)}: format 'bf16' always exists and cannot be redefined; rename it")
        for role in ("weight", "input"):
            operand, where = getattr(fmt, role), config.where(f"{path}.{role}")
            usable = [o.name for o in OPERANDS.values() if role in o.roles]
            if operand not in OPERANDS:
                raise UserError(f"{where}: {path}.{role} is an unknown operand '{operand}'; {nearest(operand, usable)}")
            if operand not in usable:
                raise UserError(
                    f"{where}: {path}.{role}: operand '{operand}' cannot be used as {role} "
                    f"({OPERANDS[operand].about}); expected one of {', '.join(usable)}"
                )
        for gradient, role in (("dgrad", "weight"), ("wgrad", "input")):
            if getattr(fmt, gradient) == "dequantized" and getattr(fmt, role) == "bf16":
                raise UserError(
                    f"{config.where(f'{path}.{gradient}')}: {path}.{gradient} is dequantized, but its {role} is bf16 and "
                    f"never quantized; remove {gradient}"
                )


def decide(config: RunConfig, names: Sequence[str]) -> dict[str, int]:
    """Module name -> index of the first rule that matches it. Every module has one and every rule decides one."""
    rules = config.precision.rules
    known = ["bf16", *config.precision.formats]
    tests = []
    for i, rule in enumerate(rules):
        if rule.use not in known:
            where = config.where(f"precision.rules[{i}].use")
            raise UserError(f"{where}: precision.rules[{i}] uses unknown format '{rule.use}'; {nearest(rule.use, known)}")
        tests.append(_matcher(config, i))
    deciding: dict[str, int] = {}
    for name in names:
        first = next((i for i, test in enumerate(tests) if test(name)), None)
        if first is None:
            uncovered = [_shape_of(n) for n in names if not any(test(n) for test in tests)]
            raise UserError(
                f"{config.where('precision.rules')}: no rule covers '{name}' ({len(uncovered)} modules: "
                f"{', '.join(dict.fromkeys(uncovered))}); add a rule, e.g. {{match: \"**\", use: bf16}} at the end"
            )
        deciding[name] = first
    used = set(deciding.values())
    for i in range(len(rules)):
        if i not in used:
            raise _dead_rule(config, i, names, tests, deciding)
    return deciding


def _matcher(config: RunConfig, index: int) -> Callable[[str], bool]:
    """The test of one rule over module names."""
    rule, where = config.precision.rules[index], config.where(f"precision.rules[{index}]")
    if (rule.match is None) == (rule.layers is None):
        raise UserError(f"{where}: precision.rules[{index}] needs exactly one of match and layers")
    if rule.match is not None:
        try:
            pattern = compile_pattern(rule.match)
        except ValueError as error:
            raise UserError(
                f"{where}: precision.rules[{index}].match: {error} is not a whole segment; "
                "expected a name, * for one segment or ** for any number"
            ) from None
        return lambda name: pattern.fullmatch(name + ".") is not None
    layers, count = rule.layers or (), config.model.num_layers
    outside = [i for i in layers if not -count <= i < count]
    if outside:
        raise UserError(
            f"{where}: precision.rules[{index}].layers names layer {outside[0]}, but the model has {count}; "
            f"expected {-count} to {count - 1}"
        )
    prefixes = tuple(f"model.layers.{i % count}." for i in layers)
    return lambda name: name.startswith(prefixes)


def _dead_rule(
    config: RunConfig,
    index: int,
    names: Sequence[str],
    tests: Sequence[Callable[[str], bool]],
    deciding: dict[str, int],
) -> UserError:
    rule = config.precision.rules[index]
    head = f"{config.where(f'precision.rules[{index}]')}: rule {index} ({_selector(rule)}) decides no module: "
    matched = [name for name in names if tests[index](name)]
    if matched:
        blockers = sorted({deciding[name] for name in matched})
        above = ", ".join(f"rule {i} at {config.where(f'precision.rules[{i}]')}" for i in blockers)
        return UserError(f"{head}all {len(matched)} it matches are decided above by {above}; move it up or remove it")
    shapes = list(dict.fromkeys(_shape_of(name) for name in names))
    near = nearest(_shape_of(rule.match), shapes) if rule.match else "layers is empty"
    return UserError(f"{head}nothing matches; {near}")


def fusion_groups(config: RunConfig, names: Sequence[str]) -> dict[str, str]:
    """Module name -> fusion group: siblings whose last segments stand together in ``precision.fused``."""
    present = set(names)
    groups: dict[str, str] = {}
    for i, leaves in enumerate(config.precision.fused):
        where = config.where(f"precision.fused[{i}]")
        parents = [name[: -len(leaves[0]) - 1] for name in names if leaves and name.endswith("." + leaves[0])]
        if not parents:
            known = dict.fromkeys(name.rpartition(".")[2] for name in names)
            raise UserError(f"{where}: precision.fused[{i}] {list(leaves)} groups no module; {nearest(''.join(leaves[:1]), known)}")
        for parent in parents:
            group = f"{parent}.{_group_name(leaves)}"
            for name in (f"{parent}.{leaf}" for leaf in leaves):
                if name not in present or name in groups:
                    reason = "is in two groups" if name in groups else "does not exist"
                    raise UserError(f"{where}: precision.fused[{i}] {list(leaves)}: module '{name}' {reason}")
                groups[name] = group
    return groups


def _group_name(leaves: Sequence[str]) -> str:
    """[q_proj, k_proj, v_proj] -> qkv_proj; [gate_proj, up_proj] -> gate_up_proj."""
    stems = [leaf.removesuffix("_proj") for leaf in leaves]
    return ("" if all(len(stem) == 1 for stem in stems) else "_").join(stems) + "_proj"


def check_high_precision(plan: PrecisionPlan, family: ModelFamily) -> None:
    """Router and lm_head decide tokens and experts directly; they are never quantized."""
    for entry in plan.entries:
        role = family.high_precision_role(entry.name)
        if role and entry.quantized:
            pattern = _shape_of(entry.name)
            raise UserError(
                f"{entry.rule}: gives format '{entry.format}' to the {role} '{entry.name}', which is never quantized; "
                f'put {{match: "{pattern}", use: bf16}} above it'
            )


def check_shapes(config: RunConfig, plan: PrecisionPlan) -> None:
    """K and N divide by the operand's blocks, whole and per tensor-parallel shard."""
    tp = config.learner.tensor_parallel
    for entry in plan.entries:
        row_parallel = entry.name.endswith((".o_proj", ".down_proj"))  # megatron splits their K, all others' N
        k_shards, n_shards = (tp, 1) if row_parallel else (1, tp)
        for role in ("weight", "input"):
            operand = OPERANDS[getattr(entry, role)]
            rows_multiple = operand.rows_multiple if role == "weight" else 1
            for axis, size, shards, multiple in (
                ("K", entry.k, k_shards, operand.k_multiple),
                ("N", entry.n, n_shards, rows_multiple),
            ):
                if size % (multiple * shards if multiple > 1 else 1):
                    shard = f" over {shards} tensor-parallel ranks" if shards > 1 else ""
                    raise UserError(
                        f"{entry.rule}: module '{entry.name}' has {axis} = {size}{shard}, but {role} operand "
                        f"'{operand.name}' needs a multiple of {multiple} per rank; use another format for it"
                    )


def check_groups(plan: PrecisionPlan, family: ModelFamily) -> None:
    """A fusion group is one GEMM with one outer scale, so its members are decided alike."""
    for entry in plan.entries:
        first = plan.group_members(entry.group)[0] if entry.group else entry
        if (entry.weight, entry.input, entry.dgrad, entry.wgrad) != (first.weight, first.input, first.dgrad, first.wgrad):
            raise UserError(
                f"{entry.rule}: fusion group '{entry.group}' is mixed: '{entry.name}' has format '{entry.format}', but "
                f"'{first.name}' has '{first.format}' by {first.rule}; give the members one format"
            )


def check_alignment(config: RunConfig, plan: PrecisionPlan) -> None:
    """aligned and strict promise the same numbers on both sides; refuse choices that break the promise."""
    if plan.alignment == "off":
        return
    head = f"{config.where('precision.alignment')}: precision.alignment is {plan.alignment}, but "
    tensor_wide = next((e for e in plan.entries if e.input == "nvfp4_tensor"), None)
    if tensor_wide:
        raise UserError(
            f"{head}format '{tensor_wide.format}' ({config.where(f'precision.formats.{tensor_wide.format}.input')}) has a "
            "tensor-wide input scale, so a token's codes depend on its neighbours; use input nvfp4_row or alignment: off"
        )
    if plan.kv_cache != "bf16":
        raise UserError(
            f"{head}precision.kv_cache is {plan.kv_cache} ({config.where('precision.kv_cache')}), which only the sampler "
            "has; use kv_cache: bf16 or alignment: off"
        )
    if plan.lm_head_dtype != "fp32":
        raise UserError(
            f"{head}precision.lm_head_dtype is {plan.lm_head_dtype} ({config.where('precision.lm_head_dtype')}); "
            "use lm_head_dtype: fp32 or alignment: off"
        )


def _rule_text(config: RunConfig, index: int) -> str:
    rule = config.precision.rules[index]
    return f"{config.where(f'precision.rules[{index}]')}: rule {index} ({_selector(rule)} -> {rule.use})"


def _selector(rule: RuleConfig) -> str:
    return f"match {rule.match}" if rule.match is not None else f"layers {list(rule.layers or ())}"


def _shape_of(name: str) -> str:
    """The name with every number replaced by *: one pattern for all layers and experts."""
    return ".".join("*" if segment.isdigit() else segment for segment in name.split("."))
