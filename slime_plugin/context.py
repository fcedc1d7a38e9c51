"""The recipe and the plan of this process, from what `minite launch` put into slime's arguments."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from typing import Any

from minite.config import PrecisionPlan, RunConfig, config_from_dict, resolve_plan
from minite.errors import UserError


@dataclass(frozen=True)
class Context:
    """What every hook obeys."""

    config: RunConfig
    plan: PrecisionPlan


def context(args: Any) -> Context:
    """The recipe in ``args.minite``, resolved here; its digest must be the one that was launched.

    Raises UserError where slime was started without minite launch's --custom-config-path, or by another miniTE.
    """
    sent = getattr(args, "minite", None)
    if not isinstance(sent, dict) or not {"recipe", "plan_digest"} <= sent.keys():
        raise UserError(
            f"slime's arguments have minite = {sent!r}, expected the recipe and its plan's digest; "
            "start slime with minite launch, or pass its config.yaml as --custom-config-path"
        )
    found = _resolved(json.dumps(sent["recipe"]))
    if found.plan.digest != sent["plan_digest"]:
        raise UserError(
            f"the recipe in --custom-config-path is plan {found.plan.digest[:12]} here, but was launched as "
            f"{sent['plan_digest'][:12]}; install one version of miniTE everywhere, and launch anew"
        )
    return found


@cache
def _resolved(recipe: str) -> Context:
    """By the recipe's text: hooks are called often, and resolving a plan of 18,000 linears takes a second."""
    config = config_from_dict(json.loads(recipe), "--custom-config-path")
    return Context(config, resolve_plan(config))
