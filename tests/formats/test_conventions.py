"""Reading other libraries' codes as they read them: their golden files, value for value. BITWISE."""

from __future__ import annotations

import golden_te
import pytest
import torch
from cases import normal, seeded
from safetensors.torch import load_file
from tolerances import assert_same_bytes

from minite.formats import FormatError, nvfp4
from minite.formats.conventions import CONVENTIONS, amax_of, dequantize

LIBRARIES = {  # convention -> its golden file, the key of what it reads back
    "torchao": ("nvfp4_torchao.safetensors", "dequant_fp32"),
    "modelopt": ("nvfp4_modelopt.safetensors", "dequant_fp32"),
    "compressed_tensors": ("nvfp4_ct.safetensors", "decompressed"),
}


def golden(convention):
    return load_file(golden_te.FOLDER / LIBRARIES[convention][0])


def read(file, name, stored_as, convention):
    scale = file[f"{name}/scales"].view(torch.float8_e4m3fn)
    return dequantize(file[f"{name}/codes"], scale, file[f"{name}/{stored_as}"], convention)


@pytest.mark.parametrize("name", golden_te.INPUTS)
@pytest.mark.parametrize("convention", LIBRARIES)
def test_their_golden_files_are_read_as_they_read_them(convention, name):
    file, key = golden(convention), LIBRARIES[convention][1]
    got = read(file, name, CONVENTIONS[convention].stored_as, convention)
    assert_same_bytes(golden_te.one_nan(got), golden_te.one_nan(file[f"{name}/{key}"]), convention)


@pytest.mark.parametrize("name", golden_te.INPUTS)
def test_transformer_engine_is_read_as_nvfp4_does(name):
    file = golden_te.fields(name, "1d")
    got = dequantize(file["codes"], file["scales"].view(torch.float8_e4m3fn), file["amax"], "te")
    assert_same_bytes(golden_te.one_nan(got), golden_te.one_nan(file["dequant_fp32"]))


@pytest.mark.parametrize("other", ["torchao", "modelopt"])
def test_another_convention_would_not_do(other):
    """The orders differ in the values of these very files, so the test above can tell them apart.

    compressed-tensors reads in BF16, where all orders agree on these files; bfloat16 factors would not.
    """
    file = golden(other)
    outer = amax_of(file[f"randn/{CONVENTIONS[other].stored_as}"], other)
    scale = file["randn/scales"].view(torch.float8_e4m3fn)
    got = dequantize(file["randn/codes"], scale, outer, "te")
    assert (got.view(torch.int32) != file["randn/dequant_fp32"].view(torch.int32)).any()


@pytest.mark.parametrize("convention", LIBRARIES)
@pytest.mark.parametrize("name", ["randn", "outliers", "zero_blocks", "ties", "const_one", "bf16_max"])
def test_their_outer_scale_is_what_the_table_says(convention, name):
    how = CONVENTIONS[convention]
    amax = golden_te.fields(name, "1d")["amax"].reshape(())
    theirs = golden(convention)[f"{name}/{how.stored_as}"].reshape(())
    ours = how.outer_of(amax)
    if convention == "compressed_tensors":  # computed in the dtype of the weights
        ours = (2688 / amax.bfloat16()).float()
    assert_same_bytes(ours, theirs)


@pytest.mark.parametrize("convention", ["te", "modelopt", "torchao", "miles"])
def test_amax_of_bf16_weights_comes_back_exactly(convention):
    how = CONVENTIONS[convention]
    exponent = torch.randint(-30, 30, (20_000,), generator=seeded(1)).float()
    amax = (torch.rand(20_000, generator=seeded(0)) + 1).mul(torch.exp2(exponent)).bfloat16().float()
    assert_same_bytes(amax_of(how.outer_of(amax), convention), amax)
    if how.meaning == "decode":
        naive = how.outer_of(amax) * 2688
        assert (naive != amax).any(), "multiplying back would do as well"


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_amax_of_any_float32_gives_the_same_outer_scale(convention):
    how = CONVENTIONS[convention]
    amax = torch.rand(20_000, generator=seeded(2)) * 9 + 1e-3
    outer = how.outer_of(amax)
    assert_same_bytes(how.outer_of(amax_of(outer, convention)), outer)


def test_amax_of_a_rounded_encode_scale_is_near():
    outer = torch.tensor([656.0, 1.0, 2688.0])  # 8 bits, as compressed-tensors computes them for BF16 weights
    assert torch.allclose(amax_of(outer, "compressed_tensors"), 2688 / outer, rtol=1e-6)


def test_values_agree_but_for_rounding():
    x = normal(64, 128, seed=3)
    q = nvfp4.quantize(x)
    te = q.dequantize()
    for name, how in CONVENTIONS.items():
        got = dequantize(q.codes, q.block_scale, how.outer_of(q.amax), name)
        assert got.dtype == how.dtype
        bound = 2.0**-8 if how.dtype == torch.bfloat16 else 3 * 2.0**-23
        assert ((got.float() - te).abs() <= bound * te.abs()).all(), name


def test_what_does_not_fit_is_refused():
    q = nvfp4.quantize(normal(16, 32))
    with pytest.raises(FormatError, match="'gguf'.*modelopt"):
        dequantize(q.codes, q.block_scale, q.amax, "gguf")
    with pytest.raises(FormatError, match="one float32 outer scale"):
        dequantize(q.codes, q.block_scale, q.amax.double(), "te")
    with pytest.raises(FormatError, match=r"\[2\]"):
        dequantize(q.codes, q.block_scale, torch.ones(2), "modelopt")
