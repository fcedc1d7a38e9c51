"""Every tensor of the golden file, by its key: what it is compared with, or the test fails. BITWISE.

The tests of the single modes say more about each; this one makes sure that no mode, field or input is left out.
"""

from __future__ import annotations

import golden_te
import pytest
import torch
from safetensors import safe_open
from tolerances import assert_same_bytes

from minite.formats import QTensor, nvfp4
from minite.formats.columnwise import quantize_columnwise
from minite.formats.nvfp4_scales import outer_encode

KERNEL_MODES = {"1d": "1d", "2d": "2d", "row_scaled": "row"}
HADAMARD_MODES = {"1d_rht": "signs", "1d_rht_nosign": "plain"}
MODES = sorted({(key.split("/")[0], key.split("/")[1]) for key in golden_te.GOLDEN if not key.endswith("/input")})

# Fields of the other libraries' files, all compared in test_conventions.py and test_convention_table.py, but for
# torchao's "single_level": block scales without an outer one, which no checkpoint of ours has.
OTHERS = {
    "torchao": {"codes", "scales", "per_tensor_scale", "dequant_fp32", "codes_single_level", "scales_single_level"},
    "modelopt": {"codes", "scales", "weight_scale_2", "dequant_fp32"},
    "ct": {"codes", "scales", "weight_global_scale", "decompressed"},
}


def copies(name: str, mode: str) -> dict[str, QTensor]:
    """What the mode makes of the input: the copy by rows, and by columns ("_t") where the file has it."""
    x = golden_te.GOLDEN[f"{name}/input"]
    if mode in KERNEL_MODES:
        block, outer = golden_te.PLAIN[KERNEL_MODES[mode]]
        return {"": nvfp4.quantize(x, block, outer, nonfinite="te" if name in ("nan", "inf") else "error")}
    nonfinite = golden_te.nonfinite(name)
    if mode in HADAMARD_MODES:
        columns = quantize_columnwise(x, hadamard=HADAMARD_MODES[mode], nonfinite=nonfinite)
        return {"": nvfp4.quantize(x, nonfinite=nonfinite), "_t": columns}
    options = golden_te.four_over_six_options(mode) | {"nonfinite": nonfinite}
    made = {"": nvfp4.quantize(x, **options)}
    return made if options["outer"] == "row" else made | {"_t": quantize_columnwise(x, **options)}


@pytest.mark.parametrize(("name", "mode"), MODES)
def test_every_field_of_every_mode(name, mode):
    golden = golden_te.fields(name, mode)
    made: dict[str, torch.Tensor] = {}
    for suffix, q in copies(name, mode).items():
        made["codes" + suffix] = q.codes
        made["scales" + suffix] = golden_te.scale_bytes(q.block_scale)
        made["amax" + suffix] = q.amax.reshape(-1)
    rows = copies(name, mode)[""]
    # a NaN amax, which only the Python reference keeps, makes every scale NaN; the S_enc it comes through is not kept
    s_enc = outer_encode(rows.amax, rows.outer_max).reshape(-1)
    made["s_enc"] = torch.where(rows.amax.reshape(-1).isnan(), nvfp4.FLT_MAX, s_enc)
    if mode in KERNEL_MODES:
        made["dequant_fp32"] = rows.dequantize()
    assert made.keys() == golden.keys()
    for field, tensor in golden.items():
        expected = golden_te.scale_bytes(tensor) if field.startswith("scales") else tensor
        if expected.is_floating_point():
            made[field], expected = golden_te.one_nan(made[field]), golden_te.one_nan(expected)
        assert_same_bytes(made[field], expected, f"{name}/{mode}/{field}")


def test_no_key_is_of_another_kind():
    keys = set(golden_te.GOLDEN)
    assert keys == {f"{name}/input" for name in golden_te.INPUTS} | {
        f"{name}/{mode}/{field}" for name, mode in MODES for field in golden_te.fields(name, mode)
    }
    assert len(MODES) == 317 and len(keys) == 1900


@pytest.mark.parametrize("library", OTHERS)
def test_the_other_files_hold_the_same_inputs_and_the_fields_that_are_read(library):
    with safe_open(golden_te.FOLDER / f"nvfp4_{library}.safetensors", framework="pt") as file:
        assert set(file.keys()) == {f"{name}/{field}" for name in golden_te.INPUTS for field in OTHERS[library]}
