"""What the quantizers refuse, and how they say so."""

from __future__ import annotations

import torch
from torch import Tensor

from minite.formats.errors import FormatError, NonFiniteError
from minite.formats.four_over_six import FourOverSix

INPUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
NONFINITE = ("error", "te", "te_python")
_BLOCKS = {(1, 16), (16, 16)}
_OUTERS = ("tensor", "expert", "row")


def check_options(four_over_six: object, rounding: str, generator: torch.Generator | None, nonfinite: str) -> None:
    if four_over_six is not None and not isinstance(four_over_six, FourOverSix):
        raise FormatError(f"nvfp4: four_over_six is {four_over_six!r}; expected None or FourOverSix(err=, bound=)")
    if rounding not in ("rne", "stochastic"):
        raise FormatError(f"nvfp4: rounding {rounding!r}; expected 'rne' or 'stochastic'")
    if rounding == "stochastic" and generator is None:
        raise FormatError("nvfp4: rounding 'stochastic' without a generator; pass torch.Generator().manual_seed(seed)")
    if rounding == "stochastic" and four_over_six is not None:
        raise FormatError("nvfp4: four_over_six with rounding 'stochastic'; its errors would be chance; use 'rne'")
    if nonfinite not in NONFINITE:
        raise FormatError(f"nvfp4: nonfinite {nonfinite!r}; expected one of {', '.join(NONFINITE)}")


def check_shape(x: Tensor, block: tuple[int, int], outer: str, name: str) -> None:
    if block not in _BLOCKS:
        raise FormatError(f"nvfp4: {name}: block {block}; expected (1, 16) or (16, 16)")
    if outer not in _OUTERS or (outer == "expert" and x.ndim != 3):
        want = "tensor, row, or expert (3-D)"
        raise FormatError(f"nvfp4: {name}: outer {outer!r} of a {x.ndim}-D tensor; expected {want}")
    if x.dtype not in INPUT_DTYPES:
        raise FormatError(f"nvfp4: {name}: dtype {x.dtype}; expected bfloat16, float16 or float32")
    if x.ndim < 2 or x.shape[-1] % 16 or x.shape[-2] % block[0] or not x.shape[-1]:
        want = f"[.., rows % {block[0]} == 0, K % 16 == 0]"
        raise FormatError(f"nvfp4: {name}: shape {list(x.shape)}; expected {want}; pad it or leave this module in bf16")


def check_finite(x: Tensor, amax: Tensor, format: str, name: str) -> None:
    """Raises NonFiniteError with the first bad coordinate of x; amax is taken over x, so NaN and Inf show in it."""
    if bool(torch.isfinite(amax).all()):
        return
    bad = (~torch.isfinite(x)).nonzero()
    first = bad[0].tolist()
    raise NonFiniteError(
        f"{format}: {name}: {x[tuple(first)].item()} at {first} (first of {len(bad)} non-finite values in "
        f"{list(x.shape)}); quantize needs finite values: look for the step that made it"
    )


def given_amax(amax: Tensor, measured: Tensor, format: str, name: str) -> Tensor:
    """A caller's outer amax in the shape of the measured one. Raises FormatError if it does not fit or would clip."""
    if amax.numel() != measured.numel() or amax.dtype != torch.float32:
        got = f"{amax.dtype} {list(amax.shape)}"
        raise FormatError(f"{format}: {name}: amax is {got}; expected float32 {list(measured.shape)}")
    amax = amax.to(measured.device).reshape(measured.shape)
    if bool((measured > amax).any()):
        raise FormatError(
            f"{format}: {name}: given amax is below the largest value of the tensor; take the group's max"
        )
    return amax
