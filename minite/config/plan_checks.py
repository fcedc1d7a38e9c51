"""Whether what the rules decided can be computed. One function per concern; all raise UserError naming the place."""

from __future__ import annotations

import dataclasses

from minite.config.build import nearest
from minite.config.operands import NATIVE_ROW, NATIVE_SUM, NVFP4_SUM, OPERANDS, is_nvfp4
from minite.config.plan import PlanEntry, PrecisionPlan
from minite.config.rules import numberless
from minite.config.schema import RunConfig
from minite.errors import UserError
from minite.models import ModelFamily


def check_formats(config: RunConfig) -> None:
    """Every format uses known operands in roles that they can play; "bf16" is not redefined."""
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
                    f"{where}: {path}.{role}: operand '{operand}' ({OPERANDS[operand].about}) cannot be an operand of "
                    f"that role; expected one of {', '.join(usable)}"
                )
        for gradient, role in (("dgrad", "weight"), ("wgrad", "input")):
            if getattr(fmt, gradient) != "bf16" and getattr(fmt, role) == "bf16":
                where = config.where(f"{path}.{gradient}")
                raise UserError(
                    f"{where}: {path}.{gradient} is {getattr(fmt, gradient)}, but its {role} is bf16, which is never "
                    f"quantized; remove {gradient}"
                )


def check_fused(config: RunConfig, family: ModelFamily, groups: dict[str, str]) -> None:
    """The learner holds some modules in one weight (q, k, v); those share one outer scale, so one fusion group."""
    one_layer = dataclasses.replace(config.model, num_layers=1)  # groups are alike in every layer
    for op in family.megatron_ops(one_layer):
        names = [name.removesuffix(".weight") for name in op.hf]
        if len(names) > 1 and (groups.get(names[0]) is None or len({groups.get(name) for name in names}) > 1):
            leaves = [name.rpartition(".")[2] for name in names]
            raise UserError(
                f"{config.where('precision.fused')}: precision.fused has no entry for {leaves}, which the learner "
                f"holds in one weight; add [{', '.join(leaves)}]"
            )


def check_high_precision(plan: PrecisionPlan, family: ModelFamily) -> None:
    """Router and lm_head decide experts and tokens directly; they are never quantized."""
    for entry in plan.entries:
        role = family.high_precision_role(entry.name)
        if role and entry.quantized:
            raise UserError(
                f"{entry.rule} gives format '{entry.format}' to the {role} '{entry.name}', which is never quantized; "
                f'put {{match: "{numberless(entry.name)}", use: bf16}} above it'
            )


def check_shapes(config: RunConfig, plan: PrecisionPlan, family: ModelFamily) -> None:
    """K and N divide by the blocks of each operand, in every tensor-parallel shard."""
    tp = config.learner.tensor_parallel
    checked: set[tuple[object, ...]] = set()  # 18,000 experts have few shapes
    for entry in plan.entries:
        axis = family.split_axis(entry.name)
        n_shards, k_shards = (tp if axis == "N" else 1), (tp if axis == "K" else 1)
        key = (entry.n, entry.k, entry.weight, entry.input, entry.dgrad, n_shards, k_shards)
        if key in checked:
            continue
        checked.add(key)
        weight, given = OPERANDS[entry.weight], OPERANDS[entry.input]
        for axis, size, shards, operand, multiple in (
            ("K", entry.k, k_shards, weight.name, weight.k_multiple),
            ("K", entry.k, k_shards, given.name, given.k_multiple),
            ("N", entry.n, n_shards, weight.name, weight.rows_multiple),
            ("N", entry.n, n_shards, "dgrad: nvfp4", NVFP4_SUM if entry.dgrad == "nvfp4" else 1),
        ):
            if multiple > 1 and size % (multiple * shards):
                split = f" over {shards} tensor-parallel ranks" if shards > 1 else ""
                raise UserError(
                    f"{entry.rule}: module '{entry.name}' has {axis} = {size}{split}, but operand '{operand}' "
                    f"needs a multiple of {multiple} on each rank; use another format for it"
                )


def check_backend_shapes(config: RunConfig, plan: PrecisionPlan, family: ModelFamily, backend: str) -> None:
    """What ``backend`` needs beyond its formats: the FP4 tensor cores of "native" read rows of whole 16 bytes.

    Each weight that the learner holds, a fusion group as one, in every tensor-parallel shard. For ``auto`` to be asked
    again with the backend that the machine got, before anything starts.
    """
    if backend != "native":
        return
    tp = config.learner.tensor_parallel
    checked: set[tuple[object, ...]] = set()
    for entry in plan.entries:
        members = (entry,) if entry.group is None else plan.group_members(entry.group)
        n, axis = sum(member.n for member in members), family.split_axis(entry.name)
        shards = {"N": tp if axis == "N" else 1, "K": tp if axis == "K" else 1}
        key = (n, entry.k, entry.weight, entry.dgrad, entry.wgrad, axis)
        if key in checked:
            continue
        checked.add(key)
        for letter, size, needed, operand, multiple in (
            ("K", entry.k, is_nvfp4(entry.weight), entry.weight, NATIVE_SUM),
            ("N", n, is_nvfp4(entry.weight), entry.weight, NATIVE_ROW),
            ("N", n, entry.dgrad == "nvfp4", "dgrad: nvfp4", NATIVE_SUM),
            ("K", entry.k, entry.dgrad == "nvfp4", "dgrad: nvfp4", NATIVE_ROW),
            ("K", entry.k, entry.wgrad == "nvfp4", "wgrad: nvfp4", NATIVE_ROW),
        ):
            if needed and size % (multiple * shards[letter]):
                what = f"module '{entry.name}'" if entry.group is None else f"fusion group '{entry.group}'"
                split = f" over {shards[letter]} tensor-parallel ranks" if shards[letter] > 1 else ""
                raise UserError(
                    f"{entry.rule}: {what} has {letter} = {size}{split}, but '{operand}' in the backend native needs a "
                    f"multiple of {multiple} on each rank; use precision.backend=triton, or another format for it"
                )


def check_groups(plan: PrecisionPlan, family: ModelFamily) -> None:
    """What is computed in one GEMM - a fusion group, the experts of a layer - is decided alike."""
    firsts: dict[str, PlanEntry] = {}
    for entry in plan.entries:
        for kind, group in (("fusion group", entry.group), ("grouped GEMM", family.grouped_gemm(entry.name))):
            first = firsts.setdefault(group, entry) if group else entry
            if entry.format != first.format:
                raise UserError(
                    f"{entry.rule} makes {kind} '{group}' mixed: '{entry.name}' has format '{entry.format}', but "
                    f"'{first.name}' has '{first.format}' by {first.rule}; give the members one format"
                )


def check_alignment(config: RunConfig, plan: PrecisionPlan) -> None:
    """aligned and strict promise the same numbers on both sides; choices that break the promise are refused."""
    if plan.alignment == "off":
        return
    head = f"{config.where('precision.alignment')}: precision.alignment is {plan.alignment}, but"
    tensor_wide = next((entry for entry in plan.entries if entry.input == "nvfp4_tensor"), None)
    if tensor_wide:
        place = config.where(f"precision.formats.{tensor_wide.format}.input")
        raise UserError(
            f"{head} format '{tensor_wide.format}' ({place}) has a tensor-wide input scale, which makes a token's "
            "codes depend on the tokens beside it; use input: nvfp4_row or alignment: off"
        )
    for path, aligned, why in (
        ("precision.kv_cache", "bf16", "only the sampler has a KV cache, so the learner cannot follow"),
        ("precision.lm_head_dtype", "fp32", "rounded logits differ between engines"),
    ):
        name = path.removeprefix("precision.")
        if getattr(plan, name) != aligned:
            raise UserError(
                f"{head} {path} is {getattr(plan, name)} ({config.where(path)}): {why}; "
                f"use {name}: {aligned} or alignment: off"
            )
    if plan.alignment == "aligned" and config.model.num_experts and not config.algo.router_replay:
        raise UserError(
            f"{head} algo.router_replay is false ({config.where('algo.router_replay')}): a token near a tie would take "
            "other experts on the other side; use router_replay: true, or alignment: strict or off"
        )
    for path, whole in (("sampler.top_p", 1.0), ("sampler.top_k", 0)):
        got = getattr(config.sampler, path.removeprefix("sampler."))
        if got != whole:
            raise UserError(
                f"{head} {path} is {got} ({config.where(path)}): the sampler's log-probs are those of the truncated "
                f"distribution, the learner's those of the whole; use {whole:g} or alignment: off"
            )
