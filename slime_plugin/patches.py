"""The two places of slime that have no hook. Each is looked at before it is replaced.

1. ``megatron_to_hf.quantize_params``, the module's global that ``convert_to_hf`` calls: knows FP8 and INT4 only.
2. The weight updaters: their engines restore and re-process weights around an update only for INT4. Without that a
   native NVFP4 layer would multiply with codes in the layout they were sent in.

`actor_cls` would be a hook for the second, but slime's train.py does not pass one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from minite.config import PrecisionPlan
from minite.errors import UserError
from slime_plugin.proving import proving

SLIME = "624b824a (2026-08-21)"  # the version that was read
_MEGATRON = "slime.backends.megatron_utils"

QUANTIZE_PARAMETERS = ("args", "megatron_name", "converted_named_params", "quantization_config", "transform_ue8m0")
# For this quant_method alone, slime asks the engines to restore weights before an update and to process them after it.
REPROCESSED = "compressed-tensors"
UPDATERS = {
    "UpdateWeightFromTensor": f"{_MEGATRON}.update_weight.update_weight_from_tensor",
    "UpdateWeightFromDistributed": f"{_MEGATRON}.update_weight.update_weight_from_distributed",
}
UPDATER_PARAMETERS = ("self", "args", "model", "weights_getter", "model_name", "quantization_config")
_CONDITION = f'self.quantization_config["quant_method"] in ["{REPROCESSED}"]'


def replace_quantize_params(replacement: Callable[..., Any]) -> None:
    """Make every export of slime (live updates and --save-hf) call ``replacement``."""
    module = import_module(f"{_MEGATRON}.megatron_to_hf")
    check_signature(module.quantize_params, QUANTIZE_PARAMETERS)
    check_source(module.convert_to_hf, "return quantize_params(")
    module.quantize_params = replacement


def reprocess_after_updates(plan: PrecisionPlan) -> None:
    """Make slime's updaters have quantized weights processed again by the engines after every update."""
    if not any(entry.weight != "bf16" for entry in plan):
        return
    actor = import_module(f"{_MEGATRON}.actor")
    for name, home in UPDATERS.items():
        updater = getattr(import_module(home), name)
        check_updater(updater)
        setattr(actor, name, reprocessing(updater))


def prove_after_updates(plan: PrecisionPlan, backend: str) -> None:
    """Make slime's colocated updater speak with miniTE's quantization method in the engines."""
    actor, name = import_module(f"{_MEGATRON}.actor"), "UpdateWeightFromTensor"
    updater = getattr(import_module(UPDATERS[name]), name)
    check_signature(updater.__init__, UPDATER_PARAMETERS)
    check_source(updater.update_weights, "self._hf_weight_iterator.get_hf_weight_chunks(")
    check_signature(updater._send_hf_params, ("self", "hf_named_tensors"))
    setattr(actor, name, proving(updater, plan, backend))


def check_updater(updater: type[Any]) -> None:
    """An updater is the one that was read: its constructor, and the condition that is going to be met."""
    check_signature(updater.__init__, UPDATER_PARAMETERS)
    check_source(updater.update_weights, _CONDITION)


def reprocessing(updater: type[Any]) -> type[Any]:
    """A subclass that goes by the quant_method that slime re-processes. What is sent is decided elsewhere: above."""

    class Reprocessing(updater):  # type: ignore[misc]
        def __init__(self, *args: Any, quantization_config: dict[str, Any], **kwargs: Any) -> None:
            marked = {**quantization_config, "quant_method": REPROCESSED}
            super().__init__(*args, quantization_config=marked, **kwargs)

    Reprocessing.__name__ = Reprocessing.__qualname__ = f"Reprocessing{updater.__name__}"
    return Reprocessing


def check_signature(function: Callable[..., Any], parameters: tuple[str, ...]) -> None:
    found = tuple(inspect.signature(function).parameters)
    if found != parameters:
        raise UserError(
            f"{_place(function)} has parameters ({', '.join(found)}), expected ({', '.join(parameters)}) as in slime "
            f"{SLIME}; use that version, or mend slime_plugin/patches.py"
        )


def check_source(function: Callable[..., Any], text: str) -> None:
    if text not in inspect.getsource(function):
        raise UserError(
            f"{_place(function)} does not contain {text!r} as in slime {SLIME}; use that version, or mend "
            "slime_plugin/patches.py"
        )


def _place(function: Callable[..., Any]) -> str:
    module: ModuleType | None = inspect.getmodule(function)
    return f"{module.__name__ if module else '?'}.{function.__qualname__}"
