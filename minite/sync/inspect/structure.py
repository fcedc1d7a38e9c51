"""Rules that names, dtypes and shapes must keep: read from headers, before any value is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from minite.sync.inspect.findings import ERROR, NOTE, WARNING, Finding
from minite.sync.inspect.modules import FP8_BLOCK, Module
from minite.sync.names import FP8, FUSED

_AGAIN = "export the checkpoint again"
_MEMBERS = {1, *(len(members) for members in FUSED.values())}  # that one matrix may hold


def check_structure(modules: Iterable[Module], static_inputs: bool) -> Iterator[Finding]:
    """Findings of all modules. ``static_inputs``: engines will read an input scale for every quantized linear."""
    for module in modules:
        if not module.quantized:
            yield from _orphans(module)
        elif module.format == FP8_BLOCK:
            yield from _fp8(module)
        else:
            yield from _nvfp4(module, static_inputs)


def sound(module: Module) -> bool:
    """Whether the values of a quantized module can be read."""
    return all(finding.severity != ERROR for finding in check_structure([module], False))


def _nvfp4(module: Module, static_inputs: bool) -> Iterator[Finding]:
    scheme, slots, name = module.scheme, module.slots, module.name
    assert scheme is not None and scheme.outer is not None and scheme.input is not None
    missing = [part for part in (scheme.codes, scheme.block, scheme.outer) if part not in slots]
    for part in missing:
        yield Finding(ERROR, "missing-part", name, f"{part} is missing", f"copy it, or {_AGAIN}")
    if missing:
        return
    codes, scale, outer = slots[scheme.codes], slots[scheme.block], slots[scheme.outer]
    if codes.dtype != "U8" or len(codes.shape) not in (2, 3):
        what = f"{scheme.codes} is {codes.dtype} {list(codes.shape)}; expected U8 [N, K/2] or [E, N, K/2]"
        yield Finding(ERROR, "codes", name, what, _AGAIN)
        return
    *lead, n, k = module.shape
    if k % 16:
        yield Finding(ERROR, "k-multiple", name, f"K = {k} is no multiple of 16", "keep this module in BF16")
        return
    if scale.dtype != "F8_E4M3":
        mend = "view the bytes as float8_e4m3fn" if scale.dtype == "U8" else _AGAIN
        yield Finding(ERROR, "scale-dtype", name, f"{scheme.block} is {scale.dtype}; expected F8_E4M3", mend)
    if scale.shape != (*lead, n, k // 16):
        padded = scale.shape == (*lead, -(-n // 128) * 128, -(-k // 64) * 4)
        what = f"{scheme.block} is {list(scale.shape)}; expected {[*lead, n, k // 16]}"
        mend = "take the padding off and undo the 128x4 swizzle" if padded else _AGAIN
        yield Finding(ERROR, "padding" if padded else "scale-shape", name, what, mend)
    if outer.dtype != "F32":
        yield Finding(ERROR, "scale-dtype", name, f"{scheme.outer} is {outer.dtype}; expected F32", _AGAIN)
    matrices = math.prod(lead)
    for part in (scheme.outer, scheme.input):
        if part in slots and math.prod(slots[part].shape) not in {e * m for e in (1, matrices) for m in _MEMBERS}:
            what = f"{part} is {list(slots[part].shape)}; expected one number per matrix"
            yield Finding(ERROR, "scale-shape", name, what, _AGAIN)
    if n % 128 or k % 64:
        what = f"[{n}, {k}] is no multiple of [128, 64]: engines pad its scales, which some cannot reload"
        yield Finding(NOTE, "unpadded", name, what, "nothing, unless weights are updated while the engine runs")
    if static_inputs and scheme.input not in slots:
        what = f"{scheme.input} is missing; engines take 1 or whatever is in memory"
        yield Finding(WARNING, "input-scale", name, what, "minite convert writes one")


def _fp8(module: Module) -> Iterator[Finding]:
    weight, scale = module.slots.get("weight"), module.slots[FP8.block]
    if weight is None or weight.dtype != "F8_E4M3" or len(weight.shape) != 2:
        got = "missing" if weight is None else f"{weight.dtype} {list(weight.shape)}"
        yield Finding(ERROR, "codes", module.name, f"weight is {got}; expected F8_E4M3 [N, K]", _AGAIN)
        return
    want = tuple(-(-size // 128) for size in weight.shape)
    if scale.shape != want:
        what = f"{FP8.block} is {list(scale.shape)}; expected {list(want)} for 128x128 blocks"
        yield Finding(ERROR, "scale-shape", module.name, what, _AGAIN)
    if scale.dtype not in ("F32", "BF16"):
        yield Finding(ERROR, "scale-dtype", module.name, f"{FP8.block} is {scale.dtype}; expected F32", _AGAIN)


def _orphans(module: Module) -> Iterator[Finding]:
    """Parts of a quantization without the rest of it."""
    if module.format.startswith("F8_") and len(module.shape) > 1:
        yield Finding(ERROR, "missing-part", module.name, f"weight is {module.format}, but has no scale", _AGAIN)
    left = [part for part in module.parts if part.endswith(("scale", "amax")) and part not in ("k_scale", "v_scale")]
    if left and not (module.format.startswith("FP8")):
        what = f"has {left[0]}, but its weight is {module.format}"
        yield Finding(ERROR, "missing-part", module.name, what, f"copy the codes, or {_AGAIN}")
