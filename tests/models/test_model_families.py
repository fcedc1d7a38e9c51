"""Names and shapes against transformers' own checkpoints, and config.json both ways."""

from __future__ import annotations

import dataclasses
import json

import pytest
from model_configs import config
from safetensors import safe_open

from minite.errors import UserError
from minite.models import FAMILIES, get_model
from minite.models.hf_config import read_hf_config, write_hf_config

KINDS = list(FAMILIES)


@pytest.fixture(params=[(kind, tied) for kind in KINDS for tied in (False, True)], ids=str)
def checkpoint(request, tmp_path_factory):
    """(our config, directory that transformers saved a random model of that config to)."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, tied = request.param
    cfg = config(kind, tie_word_embeddings=tied, rope_theta=20_000.0, max_seq_len=64, init_std=0.03)
    folder = tmp_path_factory.mktemp(kind)
    (folder / "config.json").write_text(json.dumps(write_hf_config(cfg)))
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert type(model).__name__ == get_model(kind).architecture
    model.save_pretrained(folder / "saved")
    return cfg, folder / "saved"


def test_names_and_shapes_equal_those_that_transformers_saves(checkpoint):
    cfg, folder = checkpoint
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        saved = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    assert get_model(cfg.kind).hf_tensors(cfg) == saved


def test_transformers_understands_our_config_and_we_understand_its_own(checkpoint):
    """What we wrote went through transformers' configuration class and comes back from what that class saved."""
    cfg, folder = checkpoint
    again = read_hf_config(folder)
    assert again.checkpoint == str(folder)
    assert dataclasses.replace(again, checkpoint=None, dtype="bf16") == cfg
    saved = json.loads((folder / "config.json").read_text())
    assert saved["rope_parameters"]["rope_theta"] == 20_000.0
    assert saved.get("norm_topk_prob", True) is True


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", KINDS)
def test_config_round_trip(kind, dtype, tmp_path):
    cfg = config(kind, dtype=dtype, rms_norm_eps=1e-5)
    (tmp_path / "config.json").write_text(json.dumps(write_hf_config(cfg)))
    for path in (tmp_path, tmp_path / "config.json"):
        assert dataclasses.replace(read_hf_config(path), checkpoint=None) == cfg


def test_old_llama_config_means_what_transformers_takes_it_for(tmp_path):
    """Llama 1 and 2 wrote neither head_dim nor KV heads nor the base of RoPE."""
    from transformers import AutoConfig

    data = write_hf_config(config("llama", hidden_size=32))
    for key in ("head_dim", "num_key_value_heads", "rope_theta", "rms_norm_eps", "max_position_embeddings"):
        del data[key]
    (tmp_path / "config.json").write_text(json.dumps(data))
    ours, theirs = read_hf_config(tmp_path), AutoConfig.from_pretrained(tmp_path)
    assert ours.head_dim == theirs.head_dim == 8
    assert ours.num_kv_heads == theirs.num_key_value_heads == 4
    assert ours.rope_theta == theirs.rope_parameters["rope_theta"]
    assert ours.rms_norm_eps == theirs.rms_norm_eps
    assert ours.max_seq_len == theirs.max_position_embeddings


def edited(folder, kind="qwen3_moe", **changes) -> str:
    """The message for a config.json with some keys changed (None = removed)."""
    data = write_hf_config(config(kind)) | changes
    data = {key: value for key, value in data.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(data))
    with pytest.raises(UserError) as caught:
        read_hf_config(folder)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(folder))


def test_what_miniTE_cannot_compute_is_refused(tmp_path):
    assert edited(tmp_path, model_type="gpt2") == (
        "/config.json: model_type is 'gpt2', expected one of qwen3, qwen3_moe, llama"
    )
    assert "attention_bias is True; miniTE computes only False" in edited(tmp_path, attention_bias=True)
    assert "norm_topk_prob is False; miniTE computes only True" in edited(tmp_path, norm_topk_prob=False)
    assert "norm_topk_prob is None" in edited(tmp_path, norm_topk_prob=None)  # transformers' default is False
    assert "mlp_only_layers is [1]" in edited(tmp_path, mlp_only_layers=[1])
    assert "decoder_sparse_step is 2" in edited(tmp_path, decoder_sparse_step=2)
    assert "hidden_act is 'gelu'" in edited(tmp_path, hidden_act="gelu")
    assert "use_sliding_window is True" in edited(tmp_path, "qwen3", use_sliding_window=True)
    assert "mlp_bias is True" in edited(tmp_path, "llama", mlp_bias=True)
    assert "only unscaled RoPE" in edited(tmp_path, "llama", rope_scaling={"rope_type": "llama3", "factor": 8.0})
    assert "only unscaled RoPE" in edited(tmp_path, rope_scaling={"rope_type": "yarn", "factor": 4.0})
    assert "only unscaled RoPE" in edited(tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 1e6})
    assert "key 'num_key_value_heads' is missing" in edited(tmp_path, num_key_value_heads=None)
    assert "key 'num_experts' is missing" in edited(tmp_path, num_experts=None)


def test_missing_or_damaged_config(tmp_path):
    with pytest.raises(UserError, match="config.json: no such file; expected the config.json of"):
        read_hf_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UserError, match="config.json: not readable as JSON"):
        read_hf_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="got list, expected the object"):
        read_hf_config(tmp_path)


def test_roles_and_shares():
    cfg, family = config("qwen3_moe"), get_model("qwen3_moe")
    expert = "model.layers.0.mlp.experts.2.down_proj"
    assert family.high_precision_role("lm_head") == "lm_head"
    assert family.high_precision_role("model.layers.0.mlp.gate") == "router"
    assert family.high_precision_role(expert) is None
    assert family.token_share(cfg, expert) == pytest.approx(2 / 3)
    assert family.token_share(cfg, "lm_head") == 1.0
    assert family.split_axis(expert) is None and family.split_axis("model.layers.0.mlp.gate") is None
    assert family.split_axis("model.layers.0.self_attn.o_proj") == "K"
    assert family.split_axis("model.layers.0.self_attn.q_proj") == "N"
    assert family.grouped_gemm(expert) == "model.layers.0.mlp.experts.down_proj"
    assert family.grouped_gemm("model.layers.0.self_attn.q_proj") is None
    dense = get_model("qwen3")
    assert dense.high_precision_role("model.layers.0.mlp.gate_proj") is None
    assert dense.split_axis("model.layers.0.mlp.down_proj") == "K"


def test_unknown_kind():
    with pytest.raises(UserError, match="model.kind is 'gpt2': expected one of qwen3, qwen3_moe, llama"):
        get_model("gpt2")


def test_large_moe_sizes():
    """30.5 G parameters, of which 3.3 G see a token: the published figures of Qwen3-30B-A3B."""
    cfg = config(
        "qwen3_moe",
        num_layers=48,
        hidden_size=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        vocab_size=151_936,
        num_experts=128,
        experts_per_token=8,
        moe_intermediate_size=768,
    )
    family = get_model(cfg.kind)
    total = sum(int.__mul__(*shape) if len(shape) == 2 else shape[0] for shape in family.hf_tensors(cfg).values())
    active = sum(n * k * family.token_share(cfg, name) for name, n, k in family.linears(cfg)) + 151_936 * 2048
    assert total == 30_532_122_624
    assert active / 1e9 == pytest.approx(3.35, abs=0.01)
