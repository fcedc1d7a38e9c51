"""quant_matmul: forward and all gradient choices against float64 formulas; what is saved; TP shards; batch-mates."""

import exact
import pytest
import torch

from minite.backends.registry import get_backend
from minite.errors import UserError
from minite.formats import NonFiniteError
from minite.layers.matmul import AmaxHooks, LinearSpec, prepare_weight, quant_matmul, quantize_reduced

FORMATS = [("bf16", "bf16"), ("nvfp4_1d", "bf16"), ("nvfp4_1d", "mxfp8"), ("nvfp4_1d", "nvfp4_row")]
FORMATS += [("nvfp4_2d", "nvfp4_tensor"), ("mxfp8", "mxfp8")]
CHOICES = [("bf16", "bf16"), ("bf16", "dequantized"), ("dequantized", "bf16"), ("dequantized", "dequantized")]
W4A4 = LinearSpec("nvfp4_1d", "nvfp4_row", "bf16", "bf16")


def reference(strict=False):
    return get_backend("reference", device="cpu", strict=strict)


def run(x, w, dy, spec, backend, **kwargs):
    """y, dx, dw."""
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    y = quant_matmul(x, w, spec, backend, **kwargs)
    y.backward(dy)
    return y.detach(), x.grad, w.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("dgrad, wgrad", CHOICES)
@pytest.mark.parametrize("weight, input", FORMATS)
def test_forward_and_gradients_are_the_formula(weight, input, dgrad, wgrad, strict, dtype):
    spec = LinearSpec(weight, input, dgrad, wgrad)
    m, n, k = 21, 48, 64
    x, w, dy = (exact.randn(*s, dtype=dtype, seed=i) for i, s in enumerate([(m, k), (n, k), (m, n)]))
    results = run(x, w, dy, spec, reference(strict))
    expected = exact.forward_and_gradients(x, w, dy, spec)
    for actual, value, contraction in zip(results, expected, (k, n, m), strict=True):
        assert actual.dtype == dtype
        exact.assert_rounded_once(actual, value, contraction, strict)


@pytest.mark.parametrize("choice", ["dgrad", "wgrad"])
def test_gradient_choices_differ_when_quantization_does_something(choice):
    x, w, dy = exact.randn(8, 64), exact.randn(32, 64, seed=1), exact.randn(8, 32, seed=2)
    choices = {"dgrad": "bf16", "wgrad": "bf16"}
    original = run(x, w, dy, LinearSpec("nvfp4_1d", "nvfp4_row", **choices), reference())
    other = run(x, w, dy, LinearSpec("nvfp4_1d", "nvfp4_row", **(choices | {choice: "dequantized"})), reference())
    changed = [not torch.equal(a, b) for a, b in zip(original, other, strict=True)]
    assert changed == [False, choice == "dgrad", choice == "wgrad"]


@pytest.mark.parametrize("input", ["bf16", "nvfp4_row", "nvfp4_tensor", "mxfp8"])
def test_no_rows(input):
    spec = LinearSpec("nvfp4_1d", input, "dequantized", "dequantized")
    y, dx, dw = run(exact.randn(0, 64), exact.randn(32, 64), exact.randn(0, 32), spec, reference())
    assert y.shape == (0, 32) and dx.shape == (0, 64)
    assert torch.equal(dw, torch.zeros(32, 64, dtype=torch.bfloat16))


def saved_for_backward(x, w, spec):
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        quant_matmul(x, w, spec, reference())
    return {name for name, t in (("x", x), ("w", w)) if any(s.data_ptr() == t.data_ptr() for s in saved)}


@pytest.mark.parametrize(
    "dgrad, wgrad, x_grad, w_grad, kept",
    [
        ("bf16", "bf16", True, True, {"x", "w"}),
        ("bf16", "dequantized", True, True, {"w"}),
        ("dequantized", "bf16", True, True, {"x"}),
        ("dequantized", "dequantized", True, True, set()),
        ("bf16", "bf16", False, True, {"x"}),
        ("bf16", "bf16", True, False, {"w"}),
    ],
)
def test_only_what_the_choice_reads_is_kept_for_backward(dgrad, wgrad, x_grad, w_grad, kept):
    x, w = exact.randn(8, 64).requires_grad_(x_grad), exact.randn(32, 64, seed=1).requires_grad_(w_grad)
    assert saved_for_backward(x, w, LinearSpec("nvfp4_1d", "nvfp4_row", dgrad, wgrad)) == kept


def test_wide_output_is_not_rounded_to_the_storage_dtype():
    x, w = exact.randn(8, 64), exact.randn(32, 64, seed=1)
    y = quant_matmul(x, w, W4A4, reference(), out_dtype=torch.float32)
    assert y.dtype == torch.float32
    assert not torch.equal(y, y.bfloat16().float())
    assert torch.equal(y.bfloat16(), quant_matmul(x, w, W4A4, reference()))


def test_nonfinite_values_are_an_error_that_names_the_tensor():
    x, w = exact.randn(4, 32), exact.randn(16, 32)
    x[2, 5] = float("nan")
    with pytest.raises(NonFiniteError, match=r"input of layer\.7: .*nan at \[2, 5\]"):
        quant_matmul(x, w, W4A4, reference(), name="layer.7")
    w[3, 1] = float("inf")
    with pytest.raises(UserError, match=r"weight of layer\.7: .*inf at \[3, 1\]"):
        quant_matmul(x, w, W4A4, reference(), name="layer.7")


@pytest.mark.parametrize("x", [torch.zeros(2, 16), torch.zeros(2, 3, 32), torch.zeros(2, 32, dtype=torch.bfloat16)])
def test_operands_that_do_not_fit_are_an_error(x):
    with pytest.raises(ValueError, match="router: input"):
        quant_matmul(x, torch.zeros(16, 32), W4A4, reference(), name="router")


# Tensor parallelism, emulated: the ranks' amaxes are known beforehand and the hook takes their maximum.


def hook(amaxes):
    return lambda amax: torch.stack(amaxes).amax(0)


SHARED = [(how, axis) for how in ("nvfp4_tensor", "nvfp4_1d", "nvfp4_2d") for axis in (0, 1)]


@pytest.mark.parametrize("how, axis", [("nvfp4_row", 1), *SHARED])  # rows of a row-scaled input share nothing
def test_shards_with_the_reduced_amax_have_the_codes_of_the_whole(how, axis):
    x = exact.randn(64, 96) * torch.linspace(0.1, 3, 64)[:, None].bfloat16()
    backend, shards = reference(), x.chunk(2, dim=axis)
    whole = quantize_reduced(x, how, backend, None, "x")
    seen = []
    for shard in shards:
        quantize_reduced(shard, how, backend, lambda amax: seen.append(amax) or amax, "x")
    parts = [quantize_reduced(shard, how, backend, hook(seen), "x") for shard in shards]
    assert torch.equal(torch.cat([p.codes for p in parts], axis), whole.codes)
    scales = torch.cat([p.block_scale.view(torch.uint8) for p in parts], axis)
    assert torch.equal(scales, whole.block_scale.view(torch.uint8))
    assert all(torch.equal(p.amax, whole.amax) for p in parts)
    alone = [quantize_reduced(shard, how, backend, None, "x") for shard in shards]
    assert not torch.equal(torch.cat([p.codes for p in alone], axis), whole.codes)  # the reduction was needed


def test_formats_without_an_outer_scale_are_not_reduced():
    def fail(amax):
        raise AssertionError("reduced")

    x = exact.randn(4, 64)
    assert quantize_reduced(x, "bf16", reference(), fail, "x") is x
    assert quantize_reduced(x, "mxfp8", reference(), fail, "x").amax is None


def test_row_parallel_partial_sums_round_once_to_the_unsharded_result():
    x, w = exact.randn(6, 128), exact.randn(32, 128, seed=1)
    backend = reference(strict=True)
    whole = quant_matmul(x, w, W4A4, backend)
    row_amax, w_amax = x.abs().amax(-1).float(), w.abs().amax().float()
    hooks = AmaxHooks(reduce_input_amax=lambda amax: row_amax, reduce_weight_amax=lambda amax: w_amax)
    partial = [
        quant_matmul(x[:, s], w[:, s], W4A4, backend, None, hooks, out_dtype=torch.float64)
        for s in (slice(0, 64), slice(64, 128))
    ]
    assert torch.equal((partial[0] + partial[1]).bfloat16(), whole)


def test_strict_row_scaled_outputs_do_not_depend_on_the_batch():
    x, w = exact.randn(40, 64), exact.randn(48, 64, seed=1)
    backend = reference(strict=True)
    together = quant_matmul(x, w, W4A4, backend)
    for rows in ([0], [39], [5, 6, 7], list(range(39, -1, -1))):
        assert torch.equal(quant_matmul(x[rows], w, W4A4, backend), together[rows])


@pytest.mark.parametrize("how, changes", [("nvfp4_row", False), ("nvfp4_tensor", True)])
def test_batch_mates_change_codes_under_a_tensor_wide_scale_only(how, changes):
    x, mate = exact.randn(1, 64), 5 * exact.randn(1, 64, seed=1)
    alone = quantize_reduced(x, how, reference(), None, "x")
    together = quantize_reduced(torch.cat((x, mate)), how, reference(), None, "x")
    assert torch.equal(alone.codes, together.codes[:1]) is not changes
    w = exact.randn(32, 64, seed=2)
    spec, backend = LinearSpec("nvfp4_1d", how, "bf16", "bf16"), reference(strict=True)
    y_alone, y_together = quant_matmul(x, w, spec, backend), quant_matmul(torch.cat((x, mate)), w, spec, backend)
    assert torch.equal(y_alone, y_together[:1]) is not changes


def test_prepared_weight_holds_what_is_exported():
    w = exact.randn(32, 64)
    assert prepare_weight(w, "bf16", reference()).quantized is not None
    assert prepare_weight(w, "nvfp4_1d", reference()).quantized.bytes_equal(reference().quantize(w, "nvfp4_1d"))
