"""Names of linears in the plan (Hugging Face's) and of the modules by which SGLang computes them."""

from __future__ import annotations

from minite.config.plan import PrecisionPlan
from minite.sync.names import MEMBER_OF

METHOD = "minite"  # quantization method, as plugin.py registers it
_SGLANGS_OWN = ("gate", "lm_head")  # the router and the LM head: never quantized, so SGLang does not ask us


def operands(weight: str, input: str) -> str:
    """The precision of a GEMM in words, as proofs carry it."""
    return f"{weight} x {input}"


def expected_modules(plan: PrecisionPlan) -> dict[str, str]:
    """Module of SGLang -> operands, as the plan wants them; a module stands for all linears that are fused in it."""
    modules: dict[str, str] = {}
    for entry in plan:
        parent, _, last = entry.name.rpartition(".")
        if ".experts." in parent:
            parent = parent.partition(".experts.")[0] + ".experts"
        if last not in _SGLANGS_OWN:
            modules[f"{parent}.{MEMBER_OF.get(last, last)}"] = operands(entry.weight, entry.input)
    return modules
