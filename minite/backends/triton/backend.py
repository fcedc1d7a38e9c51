"""The backend "triton": NVFP4 emulated on a GPU from Hopper on. Same codes and scales as the reference, to the bit.

Imports triton only when it is constructed, so that `minite doctor` can ask for the reason of a refusal anywhere.
"""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from minite.backends.base import Operand
from minite.backends.reference import Prepared, ReferenceBackend
from minite.config.operands import OPERANDS
from minite.formats import FormatError, QTensor, block_scaled
from minite.formats.checks import check_finite, check_shape, given_amax
from minite.formats.nvfp4 import OUTER_MAX, PLAIN_OPERANDS, operand_blocks

if TYPE_CHECKING:  # it imports triton
    from minite.backends.triton.packed import Packed

_MIN_CAPABILITY = (9, 0)
_NEEDS = {"triton": "triton", "cuda": "cuda-bindings"}  # module -> package
_TMA_ALIGNMENT = 16  # bytes, of the first element and of rows


class TritonBackend:
    """Implements backends.base.Backend.

    Products of rows with rows run in grouped.py and packed.py, by expert also in torch's grouped product: all of them
    sum over K in steps of 16, in order, so a row has the same bits in any batch and any tile. Gradients, whose operands
    are transposed, run in torch. Operands other than PLAIN_OPERANDS are quantized by the reference, on the device.

    Weights with NaN or Inf, or an amax below their own, raise as in the reference. Activations are not looked at, which
    would stall the device in every linear: a row that holds NaN or Inf has a non-finite amax, so its results are too.
    """

    name = "triton"
    kind = "emulated"
    paths = (
        "NVFP4 weight, mostly few rows (samplers): packed, 4.5 bits an element, on sm_90 with N % 16 = K % 128 = 0; "
        "dequantized for each product of 512 rows an expert or more",
        "NVFP4 weight, otherwise (learner): dequantized once to BF16; tiles of 64 rows up to that many, else 128",
        "BF16 weight: the same kernel without scales; gradients: torch",
    )

    def __init__(self, *, strict: bool) -> None:
        from minite.backends.triton import grouped, packed, quantize
        from minite.backends.triton.layers import FusedLayers

        self.strict = strict
        self._kernels, self._grouped, self._packed = quantize, grouped, packed
        self.fused = FusedLayers(self)
        self._torch = ReferenceBackend(strict=False)

    @staticmethod
    def refused(device: str, strict: bool) -> str | None:
        """Why this backend cannot run there; None: it can."""
        if device != "cuda":
            return f"runs on CUDA devices, not on {device}"
        if strict:
            return "strict alignment promises float64 sums; it has float32 ones (aligned, both sides get equal bits)"
        missing = next((name for module, name in _NEEDS.items() if find_spec(module) is None), None)
        if missing is not None:
            return f"the package {missing} is not installed"
        if not torch.cuda.is_available():
            return "torch sees no CUDA device"
        capability = torch.cuda.get_device_capability()
        if capability < _MIN_CAPABILITY:
            return "needs sm_90 (Hopper) or newer; this GPU is sm_{}{}".format(*capability)
        return None

    def unsupported_reason(self, op: str, weight: str, input: str) -> str | None:
        """None for every pair of operand names in config.operands."""
        return self._torch.unsupported_reason(op, weight, input)

    def quantize(
        self, x_MK: Tensor, how: str, *, amax: Tensor | None = None, generator: torch.Generator | None = None
    ) -> Operand:
        """As formats.quantize_operand, byte for byte; see the class about NaN and Inf."""
        if how not in PLAIN_OPERANDS:
            return self._torch.quantize(x_MK, how, amax=amax, generator=generator)
        block, outer = operand_blocks(x_MK, how)
        x_MK = x_MK.detach()
        check_shape(x_MK, block, outer, how)
        if "weight" in OPERANDS[how].roles:
            measured = self._kernels.outer_amax(x_MK, outer)
            check_finite(x_MK, measured, "nvfp4", how)
            amax = measured if amax is None else given_amax(amax, measured, "nvfp4", how)
        elif amax is not None:
            amax = _shaped_amax(amax, x_MK, outer, how)
        return self._kernels.quantize(x_MK, block, outer, amax)

    def quantize_input(self, x_MK: Tensor, how: str, *, amax: Tensor | None = None) -> Operand | Prepared:
        """quantize and read back in one pass, for the inputs that have one."""
        if how not in ("nvfp4_row", "nvfp4_tensor"):
            return self.quantize(x_MK, how, amax=amax)
        block, outer = operand_blocks(x_MK, how)
        x_MK = x_MK.detach()
        check_shape(x_MK, block, outer, how)
        amax = None if amax is None else _shaped_amax(amax, x_MK, outer, how)
        return Prepared(*self._kernels.fake_quantize(x_MK, outer, amax), OUTER_MAX)

    def prepare(self, w: Operand, *, decode: bool = False) -> Prepared | Packed:
        """A weight [N, K] or [E, N, K] as codes x block scales in bfloat16, 16 bits an element.

        With ``decode``, where packed.cu can read it (NVFP4, sm_90, N % 16 == 0, K % 128 == 0), 4.5 bits an element.
        """
        if isinstance(w, QTensor) and w.outer == "row":
            raise FormatError("triton: a weight with one outer scale per row; expected one per tensor or expert")
        if decode and isinstance(w, QTensor) and self._packed.fits(w):
            return self._packed.pack(w)
        return self._read(w)

    def gemm(self, a_MK: Operand | Prepared, b_NK: object, out_dtype: torch.dtype) -> Tensor:
        """[M, N] = a_MK @ b_NK.T in out_dtype (bfloat16, float32). b_NK comes from prepare."""
        a = self._read(a_MK)
        if isinstance(b_NK, self._packed.Packed):
            if self._packed.takes(a, out_dtype):
                return self._packed.gemm(_aligned(a), b_NK, out_dtype)
            b_NK = self._read(b_NK.source)
        assert isinstance(b_NK, Prepared)
        if not _for_kernel(a, b_NK, out_dtype):
            return self._torch.gemm(a, b_NK, out_dtype)
        b_1NK = Prepared(b_NK.values[None], b_NK.amax, b_NK.outer_max)
        return self._grouped.gemm(_aligned(a), _aligned(b_1NK), out_dtype)

    def grouped_gemm(self, a_RK: Operand | Prepared, b_ENK: object, rows_E: Tensor, out_dtype: torch.dtype) -> Tensor:
        """[R, N]: rows of a_RK, sorted by expert, each times its expert's weight.

        rows_E: integers on the device that sum to R. Never read by the host, so a wrong sum is not noticed.
        """
        a = self._read(a_RK)
        rows_E = rows_E.to(a.values.device)
        if isinstance(b_ENK, self._packed.Packed):
            if self._packed.takes(a, out_dtype):
                return self._packed.gemm(_aligned(a), b_ENK, out_dtype, rows_E)
            b_ENK = self._read(b_ENK.source)
        assert isinstance(b_ENK, Prepared)
        if _for_kernel(a, b_ENK, out_dtype):
            return self._grouped.gemm(_aligned(a), _aligned(b_ENK), out_dtype, rows_E)
        if _for_grouped_mm(a, b_ENK, out_dtype):
            ends_E = rows_E.cumsum(0, dtype=torch.int32)
            return F.grouped_mm(_aligned(a).values, b_ENK.values.transpose(1, 2), offs=ends_E)
        return self._torch.grouped_gemm(a, b_ENK, rows_E, out_dtype)

    def grouped_wgrad(self, dy_RN: Tensor, x_RK: Tensor, rows_E: Tensor, dtype: torch.dtype) -> Tensor:
        """[E, N, K] = dy_e.T @ x_e by expert, zeros for one without rows; the host does not wait for rows_E."""
        rows_E = rows_E.to(x_RK.device)
        if not _for_grouped_wgrad(dy_RN, x_RK, dtype):
            return self._torch.grouped_wgrad(dy_RN, x_RK, rows_E, dtype)
        ends_E = rows_E.cumsum(0, dtype=torch.int32)
        return F.grouped_mm(dy_RN.contiguous().t(), x_RK.contiguous(), offs=ends_E)

    def grouped_wgrad_of_codes(self, dy_NR: QTensor, x_KR: QTensor, columns_E: Tensor, dtype: torch.dtype) -> Tensor:
        """As the reference, which reads columns_E on the host: no kernel here sums over ragged columns in float32."""
        return self._torch.grouped_wgrad_of_codes(dy_NR, x_KR, columns_E, dtype)

    def _read(self, x: Operand | Prepared) -> Prepared:
        if isinstance(x, Prepared):
            return x
        if not isinstance(x, QTensor):
            return Prepared(x, None)
        if x.format == "nvfp4":
            values = self._kernels.block_scaled(x)
        else:  # float32 block scales times codes are not exact in bfloat16: the reference multiplies those
            wide = x.block_scale is not None and x.block_scale.dtype == torch.float32
            values = block_scaled(x, torch.float32 if wide else torch.bfloat16)
        return Prepared(values, x.amax, 1.0 if x.amax is None else x.outer_max)


def _shaped_amax(amax: Tensor, x_MK: Tensor, outer: str, how: str) -> Tensor:
    """A given amax of an input, as the kernels take it."""
    shape = x_MK.shape[: {"tensor": 0, "expert": 1, "row": x_MK.ndim - 1}[outer]]
    if amax.dtype != torch.float32 or amax.numel() != shape.numel():
        got = f"{amax.dtype} {list(amax.shape)}"
        raise FormatError(f"triton: {how}: amax is {got}; expected float32 {list(shape)}")
    return amax.to(x_MK.device).reshape(shape)


def _for_kernel(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> bool:
    """Products of rows with rows, in bfloat16. Gradients have transposed operands, which torch takes as they lie."""
    return (
        a.values.dtype == b.values.dtype == torch.bfloat16
        and (a.amax is not None or b.amax is not None or (a.values.is_contiguous() and b.values.is_contiguous()))
        and a.values.shape[-1] % 8 == 0
        and out_dtype in (torch.bfloat16, torch.float32)
    )


def _for_grouped_mm(a: Prepared, b: Prepared, out_dtype: torch.dtype) -> bool:
    """torch's grouped product rounds once, to bfloat16; it wants rows of both and of the result aligned."""
    k, n = a.values.shape[-1], b.values.shape[1]
    plain = a.amax is None and b.amax is None and a.values.dtype == b.values.dtype == out_dtype == torch.bfloat16
    return plain and a.values.shape[0] > 0 and k % 8 == 0 and n % 8 == 0


def _for_grouped_wgrad(dy_RN: Tensor, x_RK: Tensor, dtype: torch.dtype) -> bool:
    """As _for_grouped_mm; both operands are read along their rows."""
    plain = dy_RN.dtype == x_RK.dtype == dtype == torch.bfloat16
    return plain and len(x_RK) > 0 and dy_RN.shape[1] % 8 == 0 and x_RK.shape[1] % 8 == 0


def _aligned(x: Prepared) -> Prepared:
    values = x.values.contiguous()
    return replace(x, values=values if values.data_ptr() % _TMA_ALIGNMENT == 0 else values.clone())
