"""The roofline of an update against sums written out by hand for a small model."""

from __future__ import annotations

from dataclasses import replace

import pytest

from minite.cli import main
from minite.config import load_recipe, resolve_plan
from minite.config.load import shipped
from minite.config.plan import PlanEntry
from minite.config.schema import ModelConfig
from minite.driver.roofline import GPUS, Gpu, Part, table, update
from minite.errors import UserError

MODEL = ModelConfig("qwen3_moe", 1, 64, 4, 2, 16, 128, num_experts=8, experts_per_token=2, moe_intermediate_size=32)
GPU = Gpu(bf16=1.0, fp4=4.0, bandwidth=1e-3)  # 10^12 flops/s and 10^9 bytes/s
GATE, UP, HEAD = (
    PlanEntry(
        "model.layers.0.mlp.experts.3.gate_proj", 32, 64, "w4a4", "nvfp4_1d", "nvfp4_row", "bf16", "bf16", "g", ""
    ),
    PlanEntry("model.layers.0.mlp.experts.3.up_proj", 32, 64, "w4a4", "nvfp4_1d", "nvfp4_row", "bf16", "bf16", "g", ""),
    PlanEntry("lm_head", 128, 64, "bf16", "bf16", "bf16", "bf16", "bf16", None, ""),
)


def parts(*entries: PlanEntry, gpu: Gpu = GPU) -> dict[str, Part]:
    return {p.name: p for p in update(MODEL, entries, tokens=1000, sequence=100, gpu=gpu)}


def test_a_fusion_group_is_one_product_over_the_tokens_that_its_expert_sees():
    found = parts(GATE, UP)
    rows, n, k = 250, 64, 64  # a quarter of the tokens: 2 of 8 experts
    operands = "(nvfp4_1d x nvfp4_row)"
    fprop = found[f"fprop mlp.experts.gate+up {operands}"]
    assert fprop.flops == 2 * rows * n * k
    assert fprop.bytes == 0.5625 * (n * k + rows * k) + 2 * rows * n
    assert found[f"quantize input of mlp.experts.gate+up {operands}"].bytes == 2.5625 * rows * k
    assert found[f"quantize weight of mlp.experts.gate+up {operands}"].bytes == 4.5625 * n * k
    assert found[f"dgrad mlp.experts.gate+up {operands}"].bytes == 2 * (n * k + rows * k + rows * n)
    assert found[f"wgrad mlp.experts.gate+up {operands}"].bytes == 4 * n * k + 2 * (rows * k + rows * n)


def test_gradients_in_nvfp4_are_fp4_products_of_operands_that_are_quantized_first():
    both = [replace(e, dgrad="nvfp4", wgrad="nvfp4") for e in (GATE, UP)]
    found, where = parts(*both, gpu=Gpu(1.0, 4.0, 1e6)), "mlp.experts.gate+up (nvfp4_1d x nvfp4_row)"
    rows, n, k = 250, 64, 64
    for name in ("dgrad", "wgrad"):
        assert found[f"{name} {where}"].ms == pytest.approx(1e3 * 2 * rows * n * k / 4e12)
    assert found[f"dgrad {where}"].bytes == 0.5625 * (rows * n + n * k) + 2 * rows * k
    assert found[f"wgrad {where}"].bytes == 0.5625 * (rows * n + rows * k) + 4 * n * k
    assert found[f"quantize for dgrad of {where}"].bytes == 2.5625 * rows * n + 4.5625 * n * k
    assert found[f"quantize for wgrad of {where}"].bytes == 4.5625 * (rows * n + rows * k)
    lone = parts(replace(GATE, wgrad="nvfp4"))
    assert [name for name in lone if "quantize for" in name] == [f"quantize for wgrad of {where.replace('+up', '')}"]


def test_bf16_beside_the_plan_has_a_bf16_backward_too():
    ends = [
        table(MODEL, [replace(GATE, dgrad=d, wgrad=d)], 4096, 64, "b300").splitlines()[-1] for d in ("bf16", "nvfp4")
    ]
    bf16 = [line.partition("; BF16 ")[2].partition(";")[0] for line in ends]
    assert bf16[0] == bf16[1] and ends[0] != ends[1]


def test_bf16_has_no_quantizers():
    found = parts(HEAD)
    assert set(found) == {"fprop lm_head", "dgrad lm_head", "wgrad lm_head", "attention", "optimizer"}
    assert found["optimizer"].bytes == 30 * 128 * 64 and found["optimizer"].passes == "step"


def test_time_is_the_larger_of_both_bounds():
    fast_memory, slow_memory = Gpu(1.0, 4.0, 1e6), Gpu(1e6, 1e6, 1e-3)
    name = "fprop mlp.experts.gate+up (nvfp4_1d x nvfp4_row)"
    by_flops, by_bytes = parts(GATE, UP, gpu=fast_memory)[name], parts(GATE, UP, gpu=slow_memory)[name]
    assert by_flops.ms == pytest.approx(1e3 * by_flops.flops / 4e12)  # on FP4 tensor cores
    assert by_bytes.ms == pytest.approx(1e3 * by_bytes.bytes / 1e9)
    without = parts(GATE, UP, gpu=replace(fast_memory, fp4=None))[name]
    assert without.ms == pytest.approx(1e3 * by_flops.flops / 1e12)


def test_attention_is_causal_and_dearer_backward():
    found = [p for p in update(MODEL, [HEAD], 1000, 100, GPU) if p.name == "attention"]
    # QK^T and PV: 4 flops per pair and channel, of which a causal mask leaves half
    assert [p.flops for p in found] == [2 * 1000 * 100 * 64, 5 * 1000 * 100 * 64]


def test_the_table_of_the_shipped_model():
    config = load_recipe(shipped("qwen3_30b_a3b_w4a4_grpo.yaml"))
    text = table(config.model, resolve_plan(config).entries, 131072, 4096, "b300")
    assert "a bound, nothing was measured" in text and "fprop mlp.experts.gate+up (nvfp4_1d x nvfp4_row)" in text
    active = 2 * 131072 * 46 * 8 * (2 * 768 + 768) * 2048 / 1e12  # the 46 quantized layers
    printed = [
        float(line.split()[-3])
        for line in text.splitlines()
        if line.startswith("fprop mlp.experts") and "nvfp4" in line
    ]
    assert sum(printed) == pytest.approx(active, abs=0.2)


def test_an_unknown_gpu_is_refused():
    with pytest.raises(UserError, match=f"GPU 'b100' is unknown; expected one of {', '.join(GPUS)}"):
        table(MODEL, [HEAD], 10, 10, "b100")


def test_the_command(capsys):
    command = ["bench", "learner", "--model", "Qwen3-4B", "--gpu", "b200", "--tokens", "1000", "-o"]
    assert main([*command, "precision.backend=reference"]) == 0
    assert "1000 tokens in sequences of 4096 on one b200" in capsys.readouterr().out
    assert main(["bench", "learner", "some.yaml", "--model", "qwen3-4b"]) == 2
    assert "got a recipe and --model; give one of them" in capsys.readouterr().err
    assert main(["bench", "learner", "--model", "gpt"]) == 2
    assert "gpt_w4a4_grpo.yaml: not in" in capsys.readouterr().err
