"""In the place of slime's ``quantize_params``: the plan's codes and scales, under ModelOpt's names or miniTE's.

slime's own function passes BF16 through for every quant_method that it does not know, without a word. This one knows
the plan: a tensor that the plan quantizes leaves as the bytes that `minite convert` writes, every other one as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from minite.config import PrecisionPlan
from minite.sync.errors import SyncError
from minite.sync.export import Quantizer, check_tensor, quantize_group
from minite.sync.targets import to_disk

Named = list[tuple[str, Tensor]]


class QuantizeParams:
    """Called by slime for every Megatron parameter, with its full Hugging Face tensors."""

    def __init__(self, plan: PrecisionPlan, quantizer: Quantizer, disk_names: bool = True) -> None:
        self.plan, self.quantizer = plan, quantizer
        self.disk_names = disk_names  # ModelOpt's, for SGLang's own method; else those of sync/stored.py, for ours

    def __call__(
        self,
        args: Any,
        megatron_name: str,
        converted_named_params: Sequence[tuple[str, Tensor]],
        quantization_config: Mapping[str, Any] | None,
        transform_ue8m0: bool = True,
    ) -> Named:
        """The tensors to send. Raises SyncError naming one that is not of the plan, or an incomplete fusion group."""
        held: dict[str, Tensor] = {}  # quantized modules
        result: Named = []
        for name, tensor in converted_named_params:
            check_tensor(name, tensor, self.plan, None)
            entry = self.plan.get(name.removesuffix(".weight"))
            if entry is None or entry.weight == "bf16":
                result.append((name, tensor))
            else:
                held[entry.name] = tensor
        while held:
            entry = self.plan[next(iter(held))]
            members = self.plan.group_members(entry.group) if entry.group else (entry,)
            missing = [member.name for member in members if member.name not in held]
            if missing:  # one outer scale for all of them: a part alone would get a scale of its own
                raise SyncError(
                    f"{megatron_name}: slime sends {entry.name} without {missing[0]}, with which it shares one outer "
                    "scale; this model's names are not those that the plugin was made for"
                )
            sent = quantize_group(members, {member.name: held.pop(member.name) for member in members}, self.quantizer)
            result += (to_disk("nvfp4", self.plan, sent, {}) if self.disk_names else sent).items()
        return result
