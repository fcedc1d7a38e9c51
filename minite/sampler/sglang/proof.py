"""Does SGLang run the plan, with the learner's bytes? Every scheduler process answers; the answers are judged here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from minite.config.plan import PrecisionPlan
from minite.sampler.sglang.names import expected_modules
from minite.sync.errors import SyncError
from minite.types import WeightVersion


def states(server_info: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One state for every scheduler process; without a "minite" where the plugin is not active."""
    told = [state.get("minite") for state in server_info["internal_states"]]
    return [{} if proof is None else {"minite": proof} for proofs in told for proof in proofs or [None]]


def check(
    states: Sequence[Mapping[str, Any]], plan: PrecisionPlan, backend: str, version: WeightVersion | None
) -> None:
    """Raises SyncError unless every process proves the plan and, with ``version``, that it holds these weights."""
    if not states:
        raise SyncError("no SGLang scheduler answered; it has died, or did not start")
    for number, state in enumerate(states):
        who, proof = f"SGLang scheduler {number}", state.get("minite")
        if proof is None:
            raise SyncError(
                f"{who}: miniTE's plugin is not active there: is miniTE installed with pip (-e) in the environment of "
                "SGLang, and does SGLANG_PLUGINS, if set, name 'minite'?"
            )
        _same(who, "rank", list(proof["rank"]), [number, len(states)])
        _same(who, "plan digest", proof["plan_digest"], plan.digest)
        _same(who, "backend", proof["backend"], backend)
        _same(who, "list of hooks that SGLang could not apply", proof["missing_hooks"], [])
        _check_modules(who, proof["modules"], expected_modules(plan))
        if version is not None:
            if proof["fault"] is not None:
                raise SyncError(f"{who}: {proof['fault']}")
            _same(who, "step of the weights", proof["step"], version.step)
            _same(who, "weight digest", proof["weight_digest"], version.weight_digest)


def _same(who: str, what: str, got: object, expected: object) -> None:
    if got != expected:
        raise SyncError(f"{who}: {what} is {got}, expected {expected}; nothing is sampled")


def _check_modules(who: str, got: Mapping[str, str], expected: Mapping[str, str]) -> None:
    for name in sorted(got.keys() | expected.keys()):
        if got.get(name) != expected.get(name):
            raise SyncError(
                f"{who}: {name} runs {got.get(name, 'outside of the plan')}, "
                f"the plan says {expected.get(name, 'nothing of it')}; nothing is sampled"
            )
