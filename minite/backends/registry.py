"""Which backends exist, which of them can run here, and why the others cannot. Imports a backend only to ask it."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from minite.errors import UserError

if TYPE_CHECKING:
    import torch

    from minite.backends.base import Backend

# Best first: "auto" takes the first that is not refused.
_HOMES = {
    "native": ("minite.backends.cutlass.backend", "NativeBackend"),
    "triton": ("minite.backends.triton.backend", "TritonBackend"),
    "cpu": ("minite.backends.cpu.backend", "CpuBackend"),
    "reference": ("minite.backends.reference", "ReferenceBackend"),
}


@dataclass(frozen=True)
class Verdict:
    """One backend and whether it can run; refusal None: it can."""

    name: str
    kind: str
    refusal: str | None


def explain(*, device: str | torch.device, strict: bool) -> list[Verdict]:
    """A verdict for every backend, best first. ``auto`` is the first without a refusal."""
    classes = {name: _load(name) for name in _HOMES}
    return [Verdict(name, c.kind, c.refused(_device_type(device), strict)) for name, c in classes.items()]


def get_backend(name: str, *, device: str | torch.device, strict: bool) -> Backend:
    """The backend ``name``, or the best one that can run with "auto". Never falls back: UserError if it cannot run."""
    if name == "te":
        raise UserError("precision.backend: 'te' (Transformer Engine) is for minite launch only; use auto here")
    if name != "auto" and name not in _HOMES:
        raise UserError(f"precision.backend: {name!r} is unknown; expected auto or one of {', '.join(_HOMES)}")
    verdicts = [v for v in explain(device=device, strict=strict) if name in ("auto", v.name)]
    for verdict in verdicts:
        if verdict.refusal is None:
            backend: Backend = _load(verdict.name)(strict=strict)
            return backend
    reasons = "; ".join(f"{v.name}: {v.refusal}" for v in verdicts)
    raise UserError(f"precision.backend: {name!r} cannot run on {device}: {reasons}; try precision.backend=auto")


def _load(name: str) -> type[Any]:
    module, class_name = _HOMES[name]
    loaded: type[Any] = getattr(import_module(module), class_name)
    return loaded


def _device_type(device: str | torch.device) -> str:
    return str(device).partition(":")[0]
