"""The table of differences in minite/formats/README.md: computed here, from writers that equal the golden files."""

from __future__ import annotations

from pathlib import Path

import golden_te
import pytest
import torch
from cases import normal
from safetensors.torch import load_file
from tolerances import assert_same_bytes
from writers import WRITERS

from minite.formats import nvfp4
from minite.formats.conventions import CONVENTIONS, dequantize

FILES = {"torchao": "torchao", "modelopt": "modelopt", "compressed_tensors": "ct"}
README = Path(nvfp4.__file__).with_name("README.md").read_text(encoding="utf-8")
# Where a library's arithmetic meets 0/0 or NaN, its codes are leftovers; no order of arithmetic is told by them.
ORDINARY = ["randn", "outliers", "ties", "const_one", "bf16_max", "zero_blocks", "scale_underflow"]


@pytest.mark.parametrize("name", ORDINARY)
@pytest.mark.parametrize("library", WRITERS)
def test_the_writers_equal_the_golden_files(library, name):
    file = load_file(golden_te.FOLDER / f"nvfp4_{FILES[library]}.safetensors")
    codes, scale, outer = WRITERS[library](golden_te.GOLDEN[f"{name}/input"])
    assert_same_bytes(outer, file[f"{name}/{CONVENTIONS[library].stored_as}"].reshape(()), "outer")
    assert_same_bytes(scale.view(torch.uint8), file[f"{name}/scales"], "scales")
    assert_same_bytes(nvfp4.pack(codes), file[f"{name}/codes"], "codes")


def rows() -> list[str]:
    x = normal(512, 2048, seed=5)
    x[448:480] *= 2.0**-15  # block scales here are E4M3 subnormals
    x[480:496] = 0
    q = nvfp4.quantize(x)
    te_codes, te_scale = nvfp4.unpack(q.codes), q.block_scale.view(torch.uint8)
    te_values = q.dequantize()
    lines = []
    for name, how in CONVENTIONS.items():
        codes, scale, outer = WRITERS[name](x) if name in WRITERS else (te_codes, q.block_scale, how.outer_of(q.amax))
        values = dequantize(q.codes, q.block_scale, outer, name)
        in_fp32 = "BF16" if values.dtype == torch.bfloat16 else f"{int((values != te_values).sum()):,}"
        in_bf16 = f"{int((values.bfloat16() != te_values.bfloat16()).sum()):,}"
        written = f"{int((scale.view(torch.uint8) != te_scale).sum()):,} | {int((codes != te_codes).sum()):,}"
        lines.append(f"| `{name}` | {how.meaning} {outer.item():.9g} | {written} | {in_fp32} | {in_bf16} |")
    return lines


def test_the_readme_has_the_table():
    missing = [line for line in rows() if line not in README]
    assert not missing, "not in minite/formats/README.md:\n" + "\n".join(rows())
