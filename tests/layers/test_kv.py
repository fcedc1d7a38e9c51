"""FP8 storage of keys and values: rounding, saturation, and that prefill and decode read the same."""

import torch

from minite.layers import ops


def test_every_e4m3_value_survives():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    values = ops.dequantize_kv(codes, torch.bfloat16)
    finite = values.isfinite()
    assert finite.sum() == 254
    assert torch.equal(ops.quantize_kv(values).view(torch.uint8)[finite], codes.view(torch.uint8)[finite])


def test_rounds_to_nearest_even_and_saturates():
    x = torch.tensor([1.0625, 1.1875, 2.0**-10, -(2.0**-9) * 1.5, 464.0, 1e9, float("-inf")])
    expected = [1.0, 1.25, 0.0, -(2.0**-8), 448.0, 448.0, -448.0]
    assert ops.dequantize_kv(ops.quantize_kv(x), torch.float32).tolist() == expected
    assert ops.quantize_kv(torch.tensor([float("nan")])).float().isnan().all()


def test_strict_decode_over_an_fp8_cache_equals_prefill_over_what_the_cache_holds():
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(12, 4, 16, generator=generator).bfloat16()
    k, v = (torch.randn(12, 2, 16, generator=generator).bfloat16() for _ in range(2))
    k8, v8 = ops.quantize_kv(k), ops.quantize_kv(v)
    cu = torch.tensor([0, 12])
    packed = ops.attention(
        q, ops.dequantize_kv(k8, torch.bfloat16), ops.dequantize_kv(v8, torch.bfloat16), cu, 0.25, True
    )
    for t in range(12):
        out = ops.attention_decode(q[t : t + 1], k8[None], v8[None], torch.tensor([t + 1]), 0.25, True)
        assert torch.equal(out[0], packed[t])
    assert not torch.equal(packed, ops.attention(q, k, v, cu, 0.25, True))  # FP8 does lose something
