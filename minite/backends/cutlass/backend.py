"""The backend "native": NVFP4 x NVFP4 on FP4 tensor cores (B200, B300). Everything else is the backend "triton".

Codes and scales are the reference's to the bit; sums are the tensor core's, outer scales in the reference's order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from minite.backends.base import Fused, Operand
from minite.backends.cutlass import ops, wgrad
from minite.backends.cutlass.build import ARCHITECTURES, library_file
from minite.backends.cutlass.library import architecture_of
from minite.backends.cutlass.weights import NativeWeight
from minite.backends.triton.backend import TritonBackend
from minite.config.operands import OPERANDS
from minite.errors import UserError
from minite.formats import FormatError, QTensor
from minite.formats.checks import check_finite, check_shape, given_amax
from minite.formats.nvfp4 import PLAIN_OPERANDS, operand_blocks

_FIRST = 100  # sm_100: the first with FP4 tensor cores


class NativeBackend:
    """Implements backends.base.Backend. NaN and Inf: as in TritonBackend, raised for weights, shown by activations."""

    name = "native"
    kind = "native"
    paths: tuple[str, ...] = ()

    def __init__(self, *, strict: bool) -> None:
        from minite.backends.cutlass.fused import NativeFused

        self.strict = strict
        self._emulation = TritonBackend(strict=False)
        self.fused: Fused | None = NativeFused(self._emulation)

    @staticmethod
    def refused(device: str, strict: bool) -> str | None:
        """Why this backend cannot run there; None: it can."""
        if device != "cuda":
            return f"runs on CUDA devices, not on {device}"
        if strict:
            return "strict alignment needs sums that do not depend on the batch; the tensor core fixes its own order"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        capability = torch.cuda.get_device_capability()
        architecture = architecture_of(capability)
        if architecture is None or architecture.number < _FIRST:
            known = ", ".join(a.name for a in ARCHITECTURES.values() if a.number >= _FIRST)
            return "needs FP4 tensor cores ({}); this GPU is sm_{}{}".format(known, *capability)
        if library_file(architecture) is None:
            return f"its kernels are not built; run scripts/build_kernels --arch {architecture.name}"
        emulation = TritonBackend.refused(device, strict)
        return None if emulation is None else f"what is not NVFP4 runs in the backend triton: {emulation}"

    def unsupported_reason(self, op: str, weight: str, input: str) -> str | None:
        """None for every pair of operand names in config.operands."""
        return self._emulation.unsupported_reason(op, weight, input)

    def quantize(
        self, x_MK: Tensor, how: str, *, amax: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Operand:
        """As formats.quantize_operand, byte for byte. BF16 NVFP4 by the library, the rest by triton."""
        if how not in PLAIN_OPERANDS or x_MK.dtype != torch.bfloat16:
            return self._emulation.quantize(x_MK, how, amax=amax, generator=generator)
        block, outer = operand_blocks(x_MK, how)
        x_MK = x_MK.detach().contiguous()
        check_shape(x_MK, block, outer, how)
        x_RK = x_MK.flatten(0, -2)
        if outer == "row":
            given = None if amax is None else _checked(amax, x_MK, outer, how)
            flat = None if given is None else given.flatten()
            codes, scales, measured = ops.quantize(x_RK, flat, None, False, block[0], False)
            outer_amax = measured.view(x_MK.shape[:-1]) if given is None else given
        else:
            outer_amax = _outer_amax(x_MK, outer, how, amax)
            flat = outer_amax.reshape(-1).contiguous()
            codes, scales, _ = ops.quantize(x_RK, flat, None, False, block[0], False)
        *lead, k = x_MK.shape
        block_scale = scales.view(torch.float8_e4m3fn).view(*lead, k // 16)
        return QTensor("nvfp4", codes.view(*lead, k // 2), block_scale, outer_amax, tuple(x_MK.shape), block)

    def quantize_input(self, x_MK: Tensor, how: str, *, amax: Tensor | None = None) -> Operand:
        """The first argument of gemm and grouped_gemm: packed codes, which is what the tensor core reads."""
        return self.quantize(x_MK, how, amax=amax)

    def prepare(self, w: Operand, *, decode: bool = False) -> object:
        """An NVFP4 weight [N, K] or [E, N, K] as codes and swizzled scales, 4.5 bits an element; others as triton's."""
        if not isinstance(w, QTensor) or w.format != "nvfp4":
            return self._emulation.prepare(w, decode=decode)
        if w.outer == "row":
            raise FormatError("native: a weight with one outer scale per row; expected one per tensor or expert")
        return NativeWeight.of(w, self._emulation)

    def gemm(self, a_MK: Operand, b_NK: object, out_dtype: torch.dtype) -> Tensor:
        """[M, N] = a_MK @ b_NK.T in out_dtype (bfloat16, float32). b_NK comes from prepare."""
        if not isinstance(b_NK, NativeWeight):
            return self._emulation.gemm(a_MK, b_NK, out_dtype)
        if not isinstance(a_MK, QTensor) or a_MK.format != "nvfp4":
            return self._emulation.gemm(a_MK, b_NK.emulated, out_dtype)
        return _multiply(a_MK, b_NK, None, out_dtype)

    def grouped_gemm(self, a_RK: Operand, b_ENK: object, rows_E: Tensor, out_dtype: torch.dtype) -> Tensor:
        """[R, N]: rows of a_RK, sorted by expert, each times its expert's weight. rows_E stays on the device."""
        if not isinstance(b_ENK, NativeWeight):
            return self._emulation.grouped_gemm(a_RK, b_ENK, rows_E, out_dtype)
        if not isinstance(a_RK, QTensor) or a_RK.format != "nvfp4":
            return self._emulation.grouped_gemm(a_RK, b_ENK.emulated, rows_E, out_dtype)
        return _multiply(a_RK, b_ENK, ops.expert_offsets(rows_E.to(a_RK.device)), out_dtype)

    def grouped_wgrad(self, dy_RN: Tensor, x_RK: Tensor, rows_E: Tensor, dtype: torch.dtype) -> Tensor:
        """[E, N, K] = dy_e.T @ x_e by expert, in BF16."""
        return self._emulation.grouped_wgrad(dy_RN, x_RK, rows_E, dtype)

    def grouped_wgrad_of_codes(self, dy_NR: QTensor, x_KR: QTensor, columns_E: Tensor, dtype: torch.dtype) -> Tensor:
        """[E, N, K] by expert, on FP4 tensor cores; dtype bfloat16 or float32."""
        if dtype not in (torch.bfloat16, torch.float32):
            raise UserError(f"native: results are bfloat16 or float32, not {dtype}; use precision.backend=reference")
        assert dy_NR.block_scale is not None and x_KR.block_scale is not None
        assert dy_NR.amax is not None and x_KR.amax is not None
        starts = wgrad.run_starts(columns_E.to(dy_NR.device))
        a_tiles, b_tiles = (
            wgrad.swizzle_columns(scales.view(torch.uint8), starts) for scales in (dy_NR.block_scale, x_KR.block_scale)
        )
        weight_amax = x_KR.amax.expand(len(columns_E)).contiguous()
        operands = (dy_NR.codes, a_tiles, dy_NR.amax, x_KR.codes, b_tiles, weight_amax)
        out: Tensor = wgrad.wgrad(*operands, starts, 1 / (dy_NR.outer_max * x_KR.outer_max), dtype)
        return out


def _outer_amax(x_MK: Tensor, outer: str, how: str, amax: Tensor | None) -> Tensor:
    """[] or [E]: the given one, checked, or the measured. A weight is measured in any case, to see NaN and Inf."""
    if "weight" not in OPERANDS[how].roles and amax is not None:
        return _checked(amax, x_MK, outer, how)
    shape = _amax_shape(x_MK, outer)
    measured: Tensor = ops.amax(x_MK, shape.numel()).view(shape)
    if "weight" not in OPERANDS[how].roles:
        return measured
    check_finite(x_MK, measured, "nvfp4", how)
    return measured if amax is None else given_amax(amax, measured, "nvfp4", how)


def _checked(amax: Tensor, x_MK: Tensor, outer: str, how: str) -> Tensor:
    shape = _amax_shape(x_MK, outer)
    if amax.dtype != torch.float32 or amax.numel() != shape.numel():
        raise FormatError(f"native: {how}: amax is {amax.dtype} {list(amax.shape)}; expected float32 {list(shape)}")
    return amax.to(x_MK.device).reshape(shape).contiguous()


def _amax_shape(x_MK: Tensor, outer: str) -> torch.Size:
    return x_MK.shape[: {"tensor": 0, "expert": 1, "row": x_MK.ndim - 1}[outer]]


def _multiply(a: QTensor, b: NativeWeight, offsets: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise UserError(f"native: results are bfloat16 or float32, not {out_dtype}; use precision.backend=reference")
    if offsets is None and not b.dense:
        raise FormatError("native.gemm: a weight of experts; expected [N, K]; use grouped_gemm")
    assert a.block_scale is not None and a.amax is not None
    m, scales = a.codes.shape[0], a.block_scale.view(torch.uint8)
    if a.layout == "swizzled":  # as fused.norm_quantize gives them, for one matrix
        assert offsets is None
        a_tiles = scales
    else:
        a_tiles = ops.swizzle(scales.contiguous(), offsets)
    alpha = 1 / (a.outer_max * b.source.outer_max)
    row_amax = a.amax.expand(m).contiguous()
    out: Tensor = ops.gemm(a.codes.contiguous(), a_tiles, row_amax, b.codes, b.tiles, b.amax, offsets, alpha, out_dtype)
    return out
