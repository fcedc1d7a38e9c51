"""CUDA C++ text -> a kernel on torch's current stream. Compiled when first asked for, by NVRTC, which torch comes with.

For what Triton cannot say: products whose operand is made in registers, in the layout that wgmma reads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

Argument = Tensor | int | float | None  # pointer, int32, float32, null pointer


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel with its block size and dynamic shared memory [bytes]."""

    function: Any
    threads: int
    shared: int

    def __call__(self, grid: tuple[int, int], arguments: Sequence[Argument]) -> None:
        """Launch on the current stream."""
        from cuda.bindings import driver

        values, kinds = zip(*(_argument(a) for a in arguments), strict=True)
        stream = torch.cuda.current_stream().cuda_stream
        launch = (self.function, *grid, 1, self.threads, 1, 1, self.shared, stream, (values, kinds), 0)
        _checked(driver.cuLaunchKernel(*launch))


@cache
def compiled(text: str, name: str, threads: int, shared: int, architecture: str, device: int) -> Kernel:
    """The extern "C" kernel ``name`` of ``text``, loaded on CUDA device ``device``."""
    from cuda.bindings import driver

    cubin = build(text, name, architecture)
    with torch.cuda.device(device):
        torch.cuda.current_stream()  # torch's context is the current one
        (module,) = _checked(driver.cuModuleLoadData(cubin))
        (function,) = _checked(driver.cuModuleGetFunction(module, name.encode()))
        attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _checked(driver.cuFuncSetAttribute(function, attribute, shared))
    return Kernel(function, threads, shared)


def build(text: str, name: str, architecture: str) -> bytes:
    """Machine code of ``text``. RuntimeError with the compiler's log when it does not compile. Needs no GPU."""
    from cuda.bindings import nvrtc

    (program,) = _checked(nvrtc.nvrtcCreateProgram(text.encode(), f"{name}.cu".encode(), 0, [], []))
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17"]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program))[0])
        _checked(nvrtc.nvrtcGetProgramLog(program, log))
        raise RuntimeError(f"{name} does not compile for {architecture}: {log.decode(errors='replace')}")
    cubin = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program))[0])
    _checked(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def _argument(a: Argument) -> tuple[int | float, Any]:
    if a is None or isinstance(a, Tensor):
        return (0 if a is None else a.data_ptr()), ctypes.c_void_p
    return a, ctypes.c_float if isinstance(a, float) else ctypes.c_int


def _checked(result: tuple[Any, ...]) -> tuple[Any, ...]:
    """The values of a call of cuda.bindings; RuntimeError if its status is not 0."""
    status, *values = result
    if int(status) != 0:
        raise RuntimeError(f"CUDA: {status!r}")
    return tuple(values)
