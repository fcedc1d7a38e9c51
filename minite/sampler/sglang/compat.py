"""What differs between the SGLang versions that miniTE runs on, in one table. Imports sglang only inside functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from minite.errors import UserError


@dataclass(frozen=True)
class Compat:
    """One range of versions. ``since`` is the first of them."""

    since: tuple[int, ...]
    choices: str  # module whose add_*_choices functions extend the launch options
    kernels: str  # package of the Triton backend's attention functions
    sessions: bool  # updates happen between begin_weight_update and end_weight_update

    def add_quantization(self, name: str, config: type[Any]) -> None:
        """Make ``quantization=name`` known."""
        import_module(self.choices).add_quantization_method_choices([name])
        registry = import_module("sglang.srt.layers.quantization")
        for table in ("BASE_QUANTIZATION_METHODS", "QUANTIZATION_METHODS"):
            getattr(registry, table)[name] = config

    def begin_update(self, engine: Any) -> None:
        if self.sessions:
            checked(engine.begin_weight_update, "begin_weight_update")

    def end_update(self, engine: Any) -> None:
        if self.sessions:
            checked(engine.end_weight_update, "end_weight_update")


_TABLE = (  # newest first
    Compat((0, 5, 18), "sglang.srt.arg_groups.choices", kernels="sglang.kernels.ops.attention", sessions=True),
    Compat(
        (0, 5, 15), choices="sglang.srt.server_args", kernels="sglang.srt.layers.attention.triton_ops", sessions=False
    ),
)
TESTED = ("0.5.23", "0.5.15.post1")


def installed() -> str | None:
    """Version of the installed sglang; None when there is none."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def compat() -> Compat:
    """The row for the installed version. UserError when sglang is missing or older than miniTE knows."""
    found = installed()
    if found is None:
        raise UserError(
            "sampler.kind is sglang, but sglang is not installed: docs/sglang.md says how to install it, "
            "or take the built-in sampler with -o sampler=embedded"
        )
    numbers = tuple(int(part) for part in found.split(".")[:3] if part.isdigit())
    for row in _TABLE:
        if numbers >= row.since:
            return row
    raise UserError(f"sglang {found} is too old: expected 0.5.15 or newer (tested: {', '.join(TESTED)}); upgrade it")


def checked(call: Callable[..., Any], what: str, **arguments: Any) -> str:
    """Call and insist on success. SGLang answers (success, message), an object with these fields, or nothing."""
    from minite.sync.errors import SyncError

    answer = call(**arguments)
    if isinstance(answer, tuple):
        success, message = answer[0], answer[1]
    else:
        success, message = getattr(answer, "success", True), getattr(answer, "message", "")
    if not success:
        raise SyncError(f"SGLang refused {what}: {message or 'without a reason'}")
    return str(message)
