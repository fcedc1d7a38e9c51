"""The golden vectors of TransformerEngine by input and mode, and how each mode is asked for here."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from minite.formats.four_over_six import FourOverSix

FOLDER = Path(__file__).parents[1] / "golden"
GOLDEN = load_file(FOLDER / "nvfp4_te.safetensors")
INPUTS = sorted({key.split("/")[0] for key in GOLDEN})
PLAIN = {"1d": ((1, 16), "tensor"), "2d": ((16, 16), "tensor"), "row": ((1, 16), "row")}


def fields(name: str, mode: str) -> dict[str, torch.Tensor]:
    prefix = f"{name}/{mode}/"
    return {key.removeprefix(prefix): tensor for key, tensor in GOLDEN.items() if key.startswith(prefix)}


def modes(*, start: str) -> list[tuple[str, str]]:
    """(input, mode) of all modes that begin with ``start``."""
    pairs = {tuple(key.split("/")[:2]) for key in GOLDEN if key.count("/") == 2}
    return sorted((name, mode) for name, mode in pairs if mode.startswith(start))


def four_over_six_options(mode: str) -> dict:
    """nvfp4.quantize options of "4o6_{1d,row,2d}_{mae,mse}_{448,256}_{exact,errfast}"."""
    _, shape, err, bound, error = mode.split("_")
    block, outer = PLAIN[shape]
    how = FourOverSix(err=err, bound=int(bound), fast_error=error == "errfast")
    return {"block": block, "outer": outer, "four_over_six": how}


def nonfinite(name: str) -> str:
    """These modes of the file follow the Python reference on NaN, and kernels and reference agree on Inf."""
    return {"nan": "te_python", "inf": "te", "bf16_max": "te"}.get(name, "error")


def scale_bytes(scale: torch.Tensor) -> torch.Tensor:
    """E4M3 bytes with one NaN: 0x7F and 0xFF are both NaN, and which one comes out depends on the machine."""
    data = scale.cpu().view(torch.uint8)
    return torch.where((data & 0x7F) == 0x7F, 0x7F, data)


def one_nan(x: torch.Tensor) -> torch.Tensor:
    """x with every NaN of the same bytes."""
    return torch.where(x.isnan(), torch.nan, x)
