"""Two stand-ins without which SGLang's CPU engine does not start from the packages on PyPI. Tests need it; no GPU does.

1. ``sgl_kernel``: PyPI has CUDA builds of it only. SGLang falls back to torch for all numerics on a CPU without AMX,
   but imports nine functions without asking. One is used in every step and is written here in torch; the eight others
   belong to speculative decoding and raise.
2. ``torchvision``: its wheels are CUDA builds whose operators are missing under a CPU torch, and its import then fails
   for want of two declarations. SGLang imports it for image models; nothing here calls it.

Both are put in place before sglang is imported, in every process that runs it, and only where torch has no CUDA.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec
from types import ModuleType
from typing import Any, NoReturn

import torch
from torch import Tensor

_SPECULATIVE = (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
)
_TORCHVISION_OPS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def install() -> list[str]:
    """Put the stand-ins in place where they are needed; a second call changes nothing. Returns what stands in now."""
    if torch.version.cuda is not None:
        return []
    if "sgl_kernel" not in sys.modules and find_spec("sgl_kernel") is None:
        sys.modules["sgl_kernel"] = _sgl_kernel()
    if not hasattr(torch.ops.torchvision, "nms"):
        library = torch.library.Library("torchvision", "DEF")
        for schema in _TORCHVISION_OPS:
            library.define(schema)
        _KEPT.append(library)
    names = ["torchvision operators"] if _KEPT else []
    return [*names, *(["sgl_kernel"] if getattr(sys.modules.get("sgl_kernel"), "is_stand_in", False) else [])]


_KEPT: list[Any] = []  # a torch Library takes its declarations with it when it is collected


def _sgl_kernel() -> ModuleType:
    module: Any = ModuleType("sgl_kernel", "miniTE's stand-in for the CPU build of sgl_kernel.")
    module.is_stand_in = True
    module.assign_req_to_token_pool_cpu = assign_req_to_token_pool_cpu
    for name in _SPECULATIVE:
        setattr(module, name, _absent(name))
    stand_in: ModuleType = module
    return stand_in


def assign_req_to_token_pool_cpu(
    request_B: Tensor, pool: Tensor, start_B: Tensor, end_B: Tensor, slot_N: Tensor, pool_len: int
) -> None:
    """Write each request's new KV slots into its row of the page table: pool[request, start:end] = its share of slot_N.

    The shares lie end to end in slot_N. In place; ``pool_len`` is the row length, which torch knows already.
    """
    length_B = end_B - start_B
    row_N = torch.repeat_interleave(request_B, length_B)
    first_B = length_B.cumsum(0) - length_B
    position_N = torch.arange(len(row_N)) - torch.repeat_interleave(first_B - start_B, length_B)
    pool[row_N.long(), position_N.long()] = slot_N[: len(row_N)].to(pool.dtype)


def _absent(name: str) -> Any:
    def function(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} is for speculative decoding, which miniTE's CPU stand-in has not")

    return function
