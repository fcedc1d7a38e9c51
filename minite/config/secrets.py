"""Keys, tokens and passwords stay out of recipes, which are copied into run directories and end up in logs of jobs."""

from __future__ import annotations

import re

from minite.config.schema import RunConfig
from minite.errors import UserError

_NAME = re.compile(r"((wandb|api|access|secret|auth)[-_]?key|(^|[^a-z])(secret|token|password|passwd))$")


def looks_secret(name: str) -> bool:
    """Whether a setting or a flag of this name would hold one."""
    return _NAME.search(name.lower()) is not None


def check_secrets(config: RunConfig) -> None:
    """Raises UserError for one in the arguments for slime, which does not repeat it."""
    where = config.where("slime.extra")
    place = "-o slime.extra=***" if where.startswith("-o") else where  # an override's place is its text
    for word in config.slime.extra:
        flag = word.partition("=")[0]
        if flag.startswith("-") and looks_secret(flag):
            raise UserError(
                f"{place}: slime.extra has {flag}: recipes are copied and logged; leave it out "
                "and set what it says in the environment, as WANDB_API_KEY or HF_TOKEN"
            )
