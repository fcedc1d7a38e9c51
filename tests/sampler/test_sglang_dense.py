"""Real SGLang on its CPU engine: a dense model in BF16 whose layers differ in precision."""

from real_sglang import NEEDS_SGLANG, sglang_engine
from tiny_engine import DENSE, QUANTIZED, engine, load, requests, shipment

pytestmark = NEEDS_SGLANG


def test_dense_in_bf16_with_layers_of_several_precisions():
    """W4A16, W4A8 and BF16: which is which is the plan's to say, and the engine's to prove."""
    rules = [
        {"match": "model.layers.0.**", "use": "w4a16"},
        {"match": "model.layers.1.mlp.*", "use": "w4a8"},
        {"match": "**", "use": "bf16"},
    ]
    formats = {name: QUANTIZED[name] for name in ("w4a16", "w4a8")}
    cfg, sglang = sglang_engine(DENSE, "w4a16", rules=rules, formats=formats)
    try:
        modules = sglang.states()[0]["minite"]["modules"]
        assert modules["model.layers.0.mlp.gate_up_proj"] == "nvfp4_1d x bf16"
        assert modules["model.layers.1.mlp.gate_up_proj"] == "nvfp4_1d x mxfp8"
        assert modules["model.layers.1.self_attn.qkv_proj"] == "bf16 x bf16"
        load(sglang, *shipment(cfg, 1))
        asked = requests(24, 1)
        pairs = list(zip(sglang.generate(asked), engine(cfg, 1).generate(asked), strict=True))
        assert sum(a.tokens == b.tokens for a, b in pairs) >= 23  # a BF16 rounding may flip, once
    finally:
        sglang.close()
