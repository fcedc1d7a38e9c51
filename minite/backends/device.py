"""Which device a recipe's ``device`` means on this machine."""

from __future__ import annotations

import torch

from minite.errors import UserError


def use_cuda(choice: str) -> bool:
    """True when ``choice`` (auto | cpu | cuda) means a GPU here. Raises UserError for cuda without one."""
    available = torch.cuda.is_available()
    if choice == "cuda" and not available:
        raise UserError("device is 'cuda', but torch sees no GPU here; use auto or cpu, or install a CUDA torch")
    return available and choice != "cpu"
