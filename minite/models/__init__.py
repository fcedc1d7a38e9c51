"""Model families: shapes and weight names. A new model is one file and one line here. Imports no torch."""

from minite.errors import UserError
from minite.models.family import ModelFamily
from minite.models.llama import Llama
from minite.models.qwen3 import Qwen3
from minite.models.qwen3_moe import Qwen3Moe

FAMILIES: dict[str, ModelFamily] = {family.kind: family for family in (Qwen3(), Qwen3Moe(), Llama())}


def get_model(kind: str) -> ModelFamily:
    """The family that ``model.kind`` names. Raises UserError for another word."""
    if kind not in FAMILIES:
        raise UserError(f"model.kind is {kind!r}: expected one of {', '.join(FAMILIES)}")
    return FAMILIES[kind]


__all__ = ["FAMILIES", "ModelFamily", "get_model"]
