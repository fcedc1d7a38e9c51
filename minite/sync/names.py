"""What others call the tensors of a quantized linear: every fact that is one convention's own, and nowhere else.

A linear X [N, K] is stored as

    scheme               codes               block scale         outer scale                   input scale
    modelopt             X.weight            X.weight_scale      X.weight_scale_2 (decode)     X.input_scale
    compressed-tensors   X.weight_packed     X.weight_scale      X.weight_global_scale (enc.)  X.input_global_scale
    fp8 (DeepSeek, HF)   X.weight            X.weight_scale_inv

Fused modules hold their members' rows one after the other (FUSED). The experts of a layer may be one tensor with a
leading axis [E, N, ..]; ModelOpt then names parts with an underscore (experts.gate_up_proj_weight_scale) and the codes
by the module alone. Transposed expert tensors [E, K/2, N] (gpt-oss, Llama 4) are not among miniTE's models.

minite adds X.weight_amax, in a file that no index lists.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

AMAX = "weight_amax"


@dataclass(frozen=True)
class Scheme:
    """Suffixes of the tensors of one linear; None: the scheme has no such tensor."""

    name: str
    codes: str
    block: str
    outer: str | None
    input: str | None
    convention: str | None  # row of formats.conventions: what the outer scale means, and in which order it multiplies


MODELOPT = Scheme("modelopt", "weight", "weight_scale", "weight_scale_2", "input_scale", "modelopt")
COMPRESSED_TENSORS = Scheme(
    "compressed-tensors",
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "input_global_scale",
    "compressed_tensors",
)
FP8 = Scheme("fp8", "weight", "weight_scale_inv", None, None, None)
SCHEMES = (MODELOPT, COMPRESSED_TENSORS, FP8)

FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}  # SGLang's names too
MEMBER_OF = {member: fused for fused, members in FUSED.items() for member in members}
KV_SCALES = {"k_proj": "k_scale", "v_proj": "v_scale"}  # beside the weight of k_proj and v_proj
NOT_LINEAR = ("embed_tokens", "norm")  # endings of modules with a weight that no quantizer touches
# Passed by: old Llama files have the first, some tied models the second, compressed-tensors with an FP8 cache the rest.
UNUSED = (".rotary_emb.inv_freq", "lm_head.weight", ".self_attn.k_scale", ".self_attn.v_scale")
_KNOWN_PARTS = {
    *(part for scheme in SCHEMES for part in (scheme.codes, scheme.block, scheme.outer, scheme.input) if part),
    *(AMAX, "bias", *KV_SCALES.values()),
}


def tensor_name(container: str, part: str, names: Container[str]) -> str | None:
    """The name under which ``names`` hold a part of a module or of a fused expert parameter; None if they do not."""
    spelled = [f"{container}.{part}", f"{container}_{part}", *([container] if part == "weight" else [])]
    return next((name for name in spelled if name in names), None)


def split_name(name: str) -> tuple[str, str]:
    """(module, part) of any tensor's name: ("x.up_proj", "weight_scale") also for x.up_proj_weight_scale."""
    head, _, tail = name.rpartition(".")
    if tail in _KNOWN_PARTS:
        return head, tail
    stem, found, part = tail.partition("_proj_")
    if found and part in _KNOWN_PARTS:
        return f"{head}.{stem}_proj", part
    return name, "weight"


def scheme_of(container: str, names: Container[str]) -> Scheme | None:
    """How a module is stored, told by the names of its parts: None for one that is not quantized."""
    for scheme, own in ((COMPRESSED_TENSORS, "weight_packed"), (MODELOPT, "weight_scale"), (FP8, "weight_scale_inv")):
        if tensor_name(container, own, names) is not None:
            return scheme
    return None
