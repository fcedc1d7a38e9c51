"""Megatron <-> HF weight ops: layout against explicit loops, round trips bit for bit, names complete."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
from model_configs import config

from minite.models import FAMILIES, get_model
from minite.models.weight_ops import Rename, SplitGateUp, SplitQKV, WeightMap

# (heads, KV heads, head_dim): full multi-head, GQA of 2, of 8, one KV head, Qwen3's ratio
HEADS = [(4, 4, 8), (4, 2, 16), (8, 1, 4), (6, 3, 2), (32, 4, 2)]


def random_tensors(shapes, seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_qkv_rows_are_grouped_by_kv_head(heads, kv_heads, dim):
    """Row r of q must be row (its group's start + its place in the group) of linear_qkv, found by plain counting."""
    op = SplitQKV("m", ("q", "k", "v"), heads, kv_heads, dim)
    rows = torch.arange((heads + 2 * kv_heads) * dim)[:, None].expand(-1, 3)
    q, k, v = (part[:, 0].tolist() for part in op.split(rows))
    expected_q, expected_k, expected_v, row = [], [], [], 0
    for _ in range(kv_heads):
        for target, count in ((expected_q, heads // kv_heads), (expected_k, 1), (expected_v, 1)):
            target += range(row, row + count * dim)
            row += count * dim
    assert (q, k, v) == (expected_q, expected_k, expected_v)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn, torch.uint8])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_split_and_join_are_inverse(heads, kv_heads, dim, dtype):
    generator = torch.Generator().manual_seed(heads)
    hidden = 5
    for op, rows in (
        (SplitQKV("m", ("q", "k", "v"), heads, kv_heads, dim), (heads + 2 * kv_heads) * dim),
        (SplitGateUp("m", ("g", "u")), 2 * heads * dim),
        (Rename("m", ("h",)), heads),
    ):
        bits = torch.randint(0, 256, (rows, hidden * dtype.itemsize), generator=generator, dtype=torch.uint8)
        tensor = bits.view(dtype)
        parts = op.split(tensor)
        assert len(parts) == len(op.hf)
        assert all(part.is_contiguous() for part in parts)
        assert torch.equal(op.join(parts).view(torch.uint8), bits)
        strided = torch.empty(hidden, rows, dtype=dtype).t()
        strided.copy_(tensor)
        assert torch.equal(op.join(op.split(strided)).contiguous().view(torch.uint8), bits)


def test_parts_do_not_share_memory_with_a_joined_tensor():
    q, k, v = torch.zeros(4, 3), torch.zeros(2, 3), torch.zeros(2, 3)
    joined = SplitQKV("m", ("q", "k", "v"), 2, 1, 2).join((q, k, v))
    joined += 1
    assert not q.any() and not k.any() and not v.any()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
def test_whole_model_round_trip(kind, tied, heads, kv_heads):
    cfg = config(kind, num_heads=heads, num_kv_heads=kv_heads, tie_word_embeddings=tied)
    family = get_model(kind)
    ops, hf = family.megatron_ops(cfg), random_tensors(family.hf_tensors(cfg), seed=heads + kv_heads)
    megatron = ops.from_hf(hf)
    assert ("output_layer.weight" in megatron) is not tied
    assert ("lm_head.weight" in hf) is not tied
    back = dict(chain.from_iterable(ops.to_hf(name, tensor) for name, tensor in megatron.items()))
    assert back.keys() == hf.keys()
    assert all(torch.equal(back[name], hf[name]) for name in hf)
    assert sum(t.numel() for t in megatron.values()) == sum(t.numel() for t in hf.values())


@pytest.mark.parametrize("kind", FAMILIES)
def test_megatron_names_and_shapes(kind):
    cfg, family = config(kind), get_model(kind)
    megatron = family.megatron_ops(cfg).from_hf(random_tensors(family.hf_tensors(cfg), seed=0))
    layer = "decoder.layers.1"
    expected = {
        "embedding.word_embeddings.weight": (40, 24),
        f"{layer}.input_layernorm.weight": (24,),
        f"{layer}.self_attention.linear_qkv.weight": (48, 24),
        f"{layer}.self_attention.linear_proj.weight": (24, 24),
        f"{layer}.pre_mlp_layernorm.weight": (24,),
        "decoder.final_layernorm.weight": (24,),
        "output_layer.weight": (40, 24),
    }
    per_layer = 6
    if kind != "llama":
        expected |= {f"{layer}.self_attention.{x}_layernorm.weight": (6,) for x in "qk"}
        per_layer += 2
    if kind != "qwen3_moe":
        expected |= {f"{layer}.mlp.linear_fc1.weight": (40, 24), f"{layer}.mlp.linear_fc2.weight": (24, 20)}
    else:
        expected[f"{layer}.mlp.router.weight"] = (3, 24)
        for e in range(3):
            expected[f"{layer}.mlp.experts.linear_fc1.weight{e}"] = (20, 24)
            expected[f"{layer}.mlp.experts.linear_fc2.weight{e}"] = (24, 10)
        per_layer += 1 + 2 * 3 - 2
    assert {name: tuple(megatron[name].shape) for name in expected} == expected
    assert len(megatron) == 3 + 2 * per_layer


def test_from_hf_takes_any_complete_subset():
    cfg, family = config("qwen3_moe"), get_model("qwen3_moe")
    ops, hf = family.megatron_ops(cfg), random_tensors(family.hf_tensors(cfg), seed=1)
    names = [f"model.layers.0.self_attn.{x}_proj.weight" for x in "vqk"]
    got = ops.from_hf({name: hf[name] for name in names})
    assert list(got) == ["decoder.layers.0.self_attention.linear_qkv.weight"]
    with pytest.raises(KeyError, match="also needs HF parameter 'model.layers.0.self_attn.q_proj.weight'"):
        ops.from_hf({names[0]: hf[names[0]]})


def test_unknown_names_are_named():
    ops = get_model("qwen3").megatron_ops(config("qwen3"))
    with pytest.raises(KeyError, match="no weight op owns HF parameter 'model.layers.7.mlp.up_proj.weight'"):
        ops.from_hf({"model.layers.7.mlp.up_proj.weight": torch.zeros(1)})
    with pytest.raises(KeyError, match="no weight op owns megatron parameter 'decoder.x'"):
        ops.to_hf("decoder.x", torch.zeros(1))
    with pytest.raises(ValueError, match="two ops own"):
        WeightMap([Rename("a", ("b",)), Rename("c", ("b",))])
