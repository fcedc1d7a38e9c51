"""Which device a recipe's ``learner.device`` or ``sampler.device`` means on this machine."""

from __future__ import annotations

import torch

from minite.config import RunConfig
from minite.errors import UserError


def use_cuda(config: RunConfig, role: str) -> bool:
    """True when the ``role``, learner or sampler, computes on a GPU here. Raises UserError for cuda without one."""
    choice: str = {"learner": config.learner, "sampler": config.sampler}[role].device
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        path = f"{role}.device"
        raise UserError(
            f"{config.where(path)}: {path} is 'cuda', but torch sees no GPU here; use auto or cpu, or install a CUDA "
            "torch"
        )
    return available and choice != "cpu"
