"""Ray's worker_process_setup_hook of a launch with ``slime.quantization: minite``.

slime checks SGLang's options in a Ray actor, where SGLang has not loaded its plugins yet, and would refuse the name of
our quantization method. It is added to SGLang's table as soon as that is imported; processes that never import it
never notice.
"""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_TABLE = "sglang.srt.layers.quantization"


def setup() -> None:
    """Called once in every Ray worker, before anything else of it."""
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds one module as usual, and has our loader around its own."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _TABLE:
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(Loader):
    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        self._inner.exec_module(module)
        from minite.sampler.sglang.names import METHOD

        for table in ("BASE_QUANTIZATION_METHODS", "QUANTIZATION_METHODS"):
            getattr(module, table).setdefault(METHOD, _Named)


class _Named:
    """Holds the place of the method where only its name is asked for: options are checked, nothing is computed."""

    @staticmethod
    def override_quantization_method(*_: Any) -> None:
        """No other method's checkpoint is ours."""
