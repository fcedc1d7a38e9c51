"""What is compared in the TRIAGE evidence: corrections, precisions, and the recipe that each pair of them makes."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import dataclass, replace
from pathlib import Path

from minite.config import RunConfig, load_recipe
from minite.config.schema import FormatConfig, PrecisionConfig, RuleConfig

RECIPE = Path(__file__).with_name("triage_evidence.yaml")
OFF = 1e9  # a limit that nothing reaches
RESULTS = "results.jsonl"  # in the folder of the results
CHUNK = 25  # steps whose means are one line of it
TAIL = "tail/negative_frac"  # tokens with d < -limit_negative and A < 0, by TRIAGE's default limits in every arm


@dataclass(frozen=True)
class Arm:
    """One way to treat the gap: fields of ``correction``, and whether the weights are then shuffled."""

    correction: dict[str, object]
    placebo: bool = False


def _triage(**changed: object) -> Arm:
    return Arm({"kind": "triage", **changed})


ARMS: dict[str, Arm] = {
    "none": Arm({"kind": "none"}),
    "tis": Arm({"kind": "tis"}),
    "icepop": Arm({"kind": "icepop"}),
    "triage": _triage(),
    # One part of the rule removed at a time.
    "no_windows": _triage(segment_risk=OFF),
    "no_responses": _triage(response_tail_frac=1.0),
    "no_damping": _triage(power=1e-9),  # widening tokens keep weight 1, tail tokens are dropped
    "no_tail": _triage(limit_negative=OFF, limit_positive=OFF, segment_risk=OFF, response_tail_frac=1.0),
    "one_limit": _triage(limit_negative=1.0),  # the negative side is treated as the positive one
    "truncate": _triage(narrowing="truncate"),  # TRIAGE and truncated importance sampling together
    # The same weights, at other tokens of the same response that the update would push as well.
    "placebo": Arm({"kind": "triage"}, placebo=True),
}


@dataclass(frozen=True)
class Precision:
    """What each engine computes in. They differ where the point is that only the sampler is quantized."""

    learner: PrecisionConfig
    sampler: PrecisionConfig


def _everywhere(weight: str, input: str, **changed: str) -> PrecisionConfig:
    """Every linear between embedding and LM head but the router: a model of two layers has none to spare."""
    rules = (
        RuleConfig(use="bf16", match="model.layers.*.mlp.gate"),
        RuleConfig(use="low", match="model.layers.**"),
        RuleConfig(use="bf16", match="**"),
    )
    return PrecisionConfig(formats={"low": FormatConfig(weight=weight, input=input)}, rules=rules, **changed)  # type: ignore[arg-type]


_BF16 = PrecisionConfig()
_PLAIN = PrecisionConfig(alignment="off")
_UNALIGNED = _everywhere("nvfp4_1d", "nvfp4_tensor", kv_cache="fp8", alignment="off")
_ALIGNED = _everywhere("nvfp4_1d", "nvfp4_row")

PRECISIONS: dict[str, Precision] = {
    "unaligned": Precision(_UNALIGNED, _UNALIGNED),  # W4A4 in both, tensor-wide amax, FP8 KV in the sampler
    "one_sided": Precision(_PLAIN, _UNALIGNED),  # the learner in BF16, the sampler as above
    "aligned": Precision(_ALIGNED, _ALIGNED),  # W4A4 without a mismatch
    "bf16": Precision(_BF16, _BF16),  # no mismatch
}
CONTROL = {"unaligned": "aligned", "one_sided": "bf16"}  # the same learner without a mismatch


def recipe(precision: str, arm: str, seed: int, steps: int, data: Path, overrides: list[str]) -> RunConfig:
    """The learner's recipe. UserError for an override that does not fit."""
    base = load_recipe(RECIPE, [f"data.path={data}", f"seed={seed}", f"driver.steps={steps}", *overrides])
    correction = replace(base.correction, **ARMS[arm].correction)  # type: ignore[arg-type]
    return replace(base, precision=PRECISIONS[precision].learner, correction=correction)


def sampler_recipe(config: RunConfig, precision: str) -> RunConfig:
    return dataclasses.replace(config, precision=PRECISIONS[precision].sampler)


def write_questions(path: Path, digits: int = 6, count: int = 8000) -> None:
    """Each digit plus its left neighbour modulo 10, round the end: ``{"prompt": "409381=", "answer": "5139..."}``.

    Answers of seven tokens, so that windows and responses have something to look at; every digit can fail alone.
    """
    order = random.Random(0)
    numbers = order.sample(range(10**digits), count)
    lines = []
    for number in numbers:
        d = [int(c) for c in f"{number:0{digits}}"]
        answer = "".join(str((d[i] + d[i - 1]) % 10) for i in range(digits))
        lines.append(f'{{"prompt": "{number:0{digits}}=", "answer": "{answer}"}}\n')
    path.write_text("".join(lines))
