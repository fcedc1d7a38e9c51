"""`minite inspect`: what a checkpoint directory holds, and which rules it breaks. See ../README.md."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from minite.sync.checkpoint import Checkpoint, read_json
from minite.sync.digests import DIGEST_FILE, verify_directory
from minite.sync.inspect.findings import ERROR, NOTE, WARNING, Finding
from minite.sync.inspect.ignore import CONFIG, QUANT_CONFIG, check_agreement, check_ignored, listed_modules
from minite.sync.inspect.modules import NVFP4, Module, modules_of
from minite.sync.inspect.report import Inspection
from minite.sync.inspect.scales import ScaleStats, measure
from minite.sync.inspect.structure import check_structure, sound
from minite.sync.names import COMPRESSED_TENSORS, FUSED

Progress = Callable[[int, int], None]  # (bytes read, bytes in all)


def inspect_directory(directory: str | Path, *, verify: bool = False, progress: Progress | None = None) -> Inspection:
    """Inspect a Hugging Face directory in any format miniTE knows.

    verify: also compare every tensor with the digest file that minite convert wrote.
    Raises UserError for a directory that cannot be read at all, and for ``verify`` without a digest file.
    """
    path = Path(directory)
    reader = Checkpoint(path)
    modules = modules_of(reader)
    config, other = _quantization(path)
    findings = list(check_structure(modules.values(), _static_inputs(config)))
    findings += _check_configs(config, other, modules)
    readable = [module for module in modules.values() if module.quantized and sound(module)]
    total, done = sum(module.nbytes for module in readable), 0
    stats: dict[str, ScaleStats] = {}
    for module in readable:
        stats[module.name] = measure(reader, module)
        done += module.nbytes
        if progress is not None:
            progress(done, total)
    findings += [f for name, s in stats.items() for f in _check_scales(modules[name], s, _static_inputs(config))]
    findings += _check_groups(modules, stats)
    digest = None
    if verify:
        difference = verify_directory(path, progress)
        if difference is None:
            digest = str(json.loads((path / DIGEST_FILE).read_text(encoding="utf-8"))["digest"])
        else:
            findings.append(Finding(ERROR, "digest", str(path), difference, "copy or convert it again"))
    return Inspection(str(path), modules, stats, findings, digest)


def _quantization(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What config.json and hf_quant_config.json say of the quantization; empty for what is not there."""
    config = read_json(path / CONFIG) if (path / CONFIG).is_file() else {}
    other = read_json(path / QUANT_CONFIG) if (path / QUANT_CONFIG).is_file() else {}
    mine, theirs = config.get("quantization_config"), other.get("quantization")
    return (mine if isinstance(mine, dict) else {}), (theirs if isinstance(theirs, dict) else {})


def _check_configs(config: Mapping[str, Any], other: Mapping[str, Any], modules: Mapping[str, Module]) -> list[Finding]:
    quantized = [module for module in modules.values() if module.quantized]
    if not config and not other:
        if not quantized:
            return []
        what = f"has no quantization_config, but {quantized[0].name} is {quantized[0].format}"
        return [Finding(ERROR, "no-config", CONFIG, what, "write one; minite convert does")]
    if not quantized and not any(module.format.startswith("FP8") for module in modules.values()):
        what = "has a quantization_config, but no module is quantized"
        return [Finding(ERROR, "no-codes", CONFIG, what, "remove it, or copy the quantized files")]
    strict = any(module.scheme in NVFP4 for module in quantized)
    found = list(check_ignored(listed_modules(config or other), modules, strict))
    return found + (list(check_agreement(config, other)) if config and other else [])


def _static_inputs(config: Mapping[str, Any]) -> bool:
    """Whether engines will ask for input scales: those of W4A4 do."""
    groups = config.get("config_groups")
    kinds = list(groups.values()) if isinstance(groups, dict) else []
    return any(isinstance(group, dict) and group.get("input_activations") for group in kinds)


def _check_scales(module: Module, stats: ScaleStats, static_inputs: bool) -> Iterator[Finding]:
    name = module.name
    if stats.nan:
        yield Finding(ERROR, "nan-scale", name, f"{stats.nan} values or scales are NaN or unusable", "export it again")
    if stats.negative:
        what = f"{stats.negative} block scales are negative; hardware ignores their sign"
        yield Finding(ERROR, "negative-scale", name, what, "export it again")
    bad = [value for value in stats.outer if not 0 < value < math.inf]
    if bad:
        yield Finding(ERROR, "outer-scale", name, f"its outer scale is {bad[0]}", "export it again")
    if stats.blocks and stats.zero == stats.blocks:
        yield Finding(NOTE, "all-zero", name, "all its codes are 0", "nothing, if the weight is meant to be 0")
    for value in stats.input if static_inputs else ():
        if not 0 < value < math.inf:
            severity = WARNING if value == 0 else ERROR
            what = f"its input scale is {value}: no calibration token passed"
            yield Finding(severity, "input-scale", name, what, "minite convert gives it that of its siblings")


def _check_groups(modules: Mapping[str, Module], stats: Mapping[str, ScaleStats]) -> Iterator[Finding]:
    """Members of a fused GEMM have one outer scale: engines use one for all and do not requantize."""
    for name, measured in stats.items():
        head, _, leaf = name.rpartition(".")
        for fused, members in FUSED.items():
            if leaf == fused and _several_in_fused(modules[name], measured, len(members)):
                yield _untied(name, sorted(v for v in set(measured.outer) if 0 < v < math.inf), modules[name])
            if leaf != members[0]:
                continue
            siblings = [stats[f"{head}.{m}"] for m in members if f"{head}.{m}" in stats]
            outer = sorted({value for s in siblings for value in s.outer if len(s.outer) == 1 and 0 < value < math.inf})
            if len(outer) > 1:
                yield _untied(f"{head}.{fused}", outer, modules[name])


def _several_in_fused(module: Module, stats: ScaleStats, members: int) -> bool:
    """Whether a fused tensor has different outer scales for the members of one matrix."""
    experts = module.shape[0] if len(module.shape) == 3 else 1
    if len(stats.outer) != experts * members:
        return False
    rows = [stats.outer[i : i + members] for i in range(0, len(stats.outer), members)]
    return any(len(set(row)) > 1 for row in rows)


def _untied(name: str, outer: list[float], module: Module) -> Finding:
    kind = "encode" if module.scheme is COMPRESSED_TENSORS else "decode"
    apart = outer[-1] / outer[0] if outer else math.nan
    what = f"its members have {len(outer)} outer scales ({kind}), {apart:.3g} times apart"
    return Finding(ERROR, "outer-scales-differ", name, what, "use minite convert --outer-scales shared")
