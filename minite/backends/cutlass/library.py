"""The shared libraries through ctypes: csrc/abi.h in Python. Torch passes addresses and its stream, nothing else."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from pathlib import Path

import torch

from minite.backends.cutlass.build import ARCHITECTURES, Architecture, library_file
from minite.errors import UserError

ABI = 4
_STATUS = {
    -1: "the library has no such kernel",
    -2: "the workspace is smaller than the kernel asks for",
    -3: "CUTLASS refuses these sizes or addresses",
    -4: "the kernel does not take this K, these rows or so many choices",
}


class GemmCall(ctypes.Structure):
    """struct MiniteGemm of abi.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("a", "a_scales", "b", "b_scales", "d", "row_amax", "weight_amax")),
        *((name, c_void_p) for name in ("starts", "scale_starts", "workspace", "stream")),
        ("workspace_bytes", c_int64),
        *((name, c_int32) for name in ("config", "m", "n", "k", "groups", "multiprocessors")),
        ("alpha", c_float),
        ("over_columns", c_int32),
    ]


class ScalesCall(ctypes.Structure):
    """struct MiniteScales of abi.h."""

    _fields_ = [*((name, c_void_p) for name in ("linear", "tiles", "starts", "scale_starts")), ("experts", c_int32)]


class QuantizeCall(ctypes.Structure):
    """struct MiniteQuantize of abi.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "amax_in", "amax_out", "codes")),
        ("scales", ScalesCall),
        ("stream", c_void_p),
        *((name, c_int64) for name in ("rows", "rows_per_amax")),
        *((name, c_int32) for name in ("k", "block_rows", "swiglu")),
    ]


class NormCall(ctypes.Structure):
    """struct MiniteNorm of abi.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("x", "addend", "weight", "total", "plain", "amax_out", "codes")),
        ("scales", ScalesCall),
        ("stream", c_void_p),
        ("rows", c_int64),
        ("k", c_int32),
        ("eps", c_float),
    ]


class PermuteCall(ctypes.Structure):
    """struct MinitePermute of abi.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("codes_in", "scales_in", "amax_in", "source_row", "amax_out", "codes")),
        ("scales", ScalesCall),
        ("stream", c_void_p),
        ("rows", c_int64),
        ("k", c_int32),
    ]


class CombineCall(ctypes.Structure):
    """struct MiniteCombine of abi.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("y", "prob", "position", "out", "stream")),
        ("tokens", c_int64),
        *((name, c_int32) for name in ("width", "top")),
    ]


class Library:
    """One loaded library. Calls enqueue on the stream given to them, or raise RuntimeError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._dll = ctypes.CDLL(str(path))
        if (abi := self._dll.minite_abi()) != ABI:
            raise UserError(f"{path} has interface {abi}; expected {ABI}; build it again with scripts/build_kernels")
        self.architecture: int = self._dll.minite_architecture()
        for name in ("minite_dense_workspace", "minite_grouped_workspace"):
            getattr(self._dll, name).restype = c_int64

    def workspace(self, call: GemmCall, *, grouped: bool) -> int:
        """Bytes that the GEMM of ``call`` needs. Touches no device."""
        size: int = self._gemm("workspace", grouped)(ctypes.byref(call))
        if size < 0:
            self._check(size)
        return size

    def gemm(self, call: GemmCall, *, grouped: bool) -> None:
        self._check(self._gemm("gemm", grouped)(ctypes.byref(call)))

    def quantize(self, call: QuantizeCall) -> None:
        self._check(self._dll.minite_quantize(ctypes.byref(call)))

    def norm_quantize(self, call: NormCall) -> None:
        self._check(self._dll.minite_norm_quantize(ctypes.byref(call)))

    def permute(self, call: PermuteCall) -> None:
        self._check(self._dll.minite_permute(ctypes.byref(call)))

    def combine(self, call: CombineCall) -> None:
        self._check(self._dll.minite_combine(ctypes.byref(call)))

    def swizzle(self, linear: int, rows: int, columns: int, scales: ScalesCall, stream: int) -> None:
        sizes = (c_int64(rows), c_int32(columns))
        self._check(self._dll.minite_swizzle(c_void_p(linear), *sizes, ctypes.byref(scales), c_void_p(stream)))

    def swizzle_columns(
        self, linear: int, rows: int, columns: int, starts: int, groups: int, tiles: int, stream: int
    ) -> None:
        sizes = (c_int64(rows), c_int32(columns), c_void_p(starts), c_int32(groups))
        self._check(self._dll.minite_swizzle_columns(c_void_p(linear), *sizes, c_void_p(tiles), c_void_p(stream)))

    def amax(self, x: int, slices: int, elements: int, amax: int, stream: int) -> None:
        sizes = (c_int64(slices), c_int64(elements))
        self._check(self._dll.minite_amax(c_void_p(x), *sizes, c_void_p(amax), c_void_p(stream)))

    def _gemm(self, what: str, grouped: bool) -> ctypes._NamedFuncPointer:
        function: ctypes._NamedFuncPointer = getattr(self._dll, f"minite_{'grouped' if grouped else 'dense'}_{what}")
        return function

    def _check(self, status: int) -> None:
        if status != 0:
            reason = _STATUS.get(status, f"CUDA error {status}")
            raise RuntimeError(f"{self.path.name}: {reason} (status {status})")


def architecture_of(capability: tuple[int, int]) -> Architecture | None:
    """The architecture whose machine code runs on a GPU of this compute capability; None: none does."""
    number = 10 * capability[0] + capability[1]
    return next((a for a in ARCHITECTURES.values() if a.number == number), None)


@cache
def load(name: str) -> Library:
    """The library of one architecture ("sm_100a"). UserError when it has not been built from these sources."""
    path = library_file(ARCHITECTURES[name])
    if path is None:
        raise UserError(f"the kernels for {name} are not built; run scripts/build_kernels --arch {name}")
    return Library(path)


def for_device(device: torch.device) -> Library:
    """The library for a CUDA device. UserError for any other device, or a GPU that no library is for."""
    if device.type != "cuda":
        raise UserError(f"native kernels run on CUDA devices, not on {device}; use precision.backend=auto")
    capability = torch.cuda.get_device_capability(device)
    architecture = architecture_of(capability)
    if architecture is None:
        here = "sm_{}{}".format(*capability)
        known = ", ".join(ARCHITECTURES)
        raise UserError(f"native kernels exist for {known}; {device} is {here}; use precision.backend=auto")
    return load(architecture.name)
