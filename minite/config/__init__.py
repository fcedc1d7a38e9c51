"""Recipes and the precision plan. Imports no torch. See README.md."""

from minite.config.load import config_from_dict, config_to_dict, load_recipe
from minite.config.plan import PlanEntry, PrecisionPlan
from minite.config.resolve import resolve_plan
from minite.config.schema import RunConfig

__all__ = [
    "PlanEntry",
    "PrecisionPlan",
    "RunConfig",
    "config_from_dict",
    "config_to_dict",
    "load_recipe",
    "resolve_plan",
]
