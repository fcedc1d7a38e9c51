"""What megatron-core 0.16.1 needs in order to run without CUDA, and why, line by line.

Megatron names CUDA in some hundred places. An import hook edits the text of ``megatron.*`` modules as they load:
neither the installed files nor the global ``torch`` change, and other libraries in the process see nothing of it.
With CUDA nothing is installed.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import logging
import re
import sys
import warnings
from collections.abc import Callable, Sequence
from types import CodeType, ModuleType
from typing import Any

import torch

CPU = torch.device("cpu")


class _Stream:
    """Stream and event in one: work on a CPU is done when the call returns, so there is nothing to wait for."""

    def wait_stream(self, other: _Stream) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self) -> _Stream:
        return self


_STREAM = _Stream()


class CpuCuda:
    """Stands in for ``torch.cuda`` inside megatron. Anything not listed here is the real ``torch.cuda``."""

    current_device = staticmethod(lambda: CPU)  # used as ``device=`` wherever a buffer is made
    # One stream for all, so that "is this another stream?" is always no: token dispatcher, gradient reduction.
    Stream = Event = current_stream = default_stream = staticmethod(lambda *args, **kwargs: _STREAM)
    stream = staticmethod(lambda stream: contextlib.nullcontext())
    synchronize = empty_cache = staticmethod(lambda: None)  # checkpoint writer
    manual_seed = staticmethod(lambda seed: torch.manual_seed(seed))  # RNG tracker: on a CPU there is one generator
    get_rng_state = staticmethod(lambda *args, **kwargs: torch.get_rng_state())
    set_rng_state = staticmethod(lambda state, *args, **kwargs: torch.set_rng_state(state))

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cuda, name)


# (pattern, replacement): applied to the text of every megatron module.
_EDITS: tuple[tuple[re.Pattern[str], str], ...] = (
    # The optimizer sorts parameters by the name of their tensor type.
    (re.compile(r"(['\"])torch\.cuda\.(Float|Half|BFloat16)Tensor\1"), r"\1torch.\2Tensor\1"),
    # Device literals: gradient norm, found_inf, checkpoint exchange.
    (re.compile(r"\bdevice=(['\"])cuda\1"), 'device="cpu"'),
    (re.compile(r"\binit_data\((['\"])cuda\1\)"), 'init_data("cpu")'),
    # Moves to the current device: checkpoint loading.
    (re.compile(r"\.cuda\((non_blocking=True|torch\.cuda\.current_device\(\))?\)"), ".cpu()"),
    # All-to-all wants its split sizes as numbers; megatron converts them only when they come from a GPU.
    (re.compile(r"torch\.is_tensor\(tensor\) and tensor\.is_cuda"), "torch.is_tensor(tensor)"),
    # Compiling small pointwise functions costs a C++ compiler and seconds per process, and gains nothing on a CPU.
    (re.compile(r"jit_fuser = torch\.compile"), "jit_fuser = noop_decorator"),
    # The rest of torch.cuda, imports and strings excepted.
    (re.compile(r"(?<!import )(?<!from )(?<!['\"])\btorch\.cuda\.(?=[a-z_]+\(|Stream\b|Event\b)"), "_minite_cuda."),
)

# Names rebound after a module was executed.
_REBIND: dict[str, dict[str, Callable[..., Any]]] = {
    # These two queue their work until CUDA is initialised, which is never: the generator would silently stay put.
    "megatron.core.tensor_parallel.random": {
        "_get_cuda_rng_state": CpuCuda.get_rng_state,
        "_set_cuda_rng_state": CpuCuda.set_rng_state,
    },
}


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        source = self.get_source(fullname)
        edited = source
        for pattern, replacement in _EDITS:
            edited = pattern.sub(replacement, edited)
        if edited == source:
            return super().get_code(fullname)
        return compile(edited, self.path, "exec", dont_inherit=True)  # never cached: .pyc files stay megatron's own

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["_minite_cuda"] = CpuCuda()
        super().exec_module(module)
        module.__dict__.update(_REBIND.get(module.__name__, {}))


class _Finder(importlib.abc.MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if not fullname.startswith("megatron."):
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is importlib.machinery.SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def mute() -> None:
    """No notices from megatron (what is not installed, what is unusual about our modules) in this process, nor about
    names that torch.distributed is going to change and megatron calls. Needed on every device."""
    logging.getLogger("megatron").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=r"megatron\.|torch\.distributed")


def install(device: str) -> None:
    """Make megatron fit for ``device`` ("cpu" or "cuda"). Call before the first import of megatron in the process."""
    if device == "cuda" or any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megatron.core was imported before minite.learner.cpu_compat.install")
    sys.meta_path.insert(0, _Finder())
