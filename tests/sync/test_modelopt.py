"""sync.modelopt and sync.checkpoint: offline codes are the online ones, and a failed conversion leaves nothing."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from small_model import recipe, shapes, weights

from minite.backends.registry import get_backend
from minite.config import resolve_plan
from minite.errors import UserError
from minite.models.hf_config import read_hf_config, write_hf_config
from minite.sync.checkpoint import INDEX, Checkpoint, CheckpointWriter
from minite.sync.export import pack
from minite.sync.modelopt import convert, outer_scale, quantization_config, read_quantized
from minite.sync.stored import from_parts
from minite.sync.verify import compare

EXPERT = "model.layers.1.mlp.experts.0.up_proj"


def source(path, config, shards: int = 2, dtype: torch.dtype = torch.bfloat16):
    """A Hugging Face directory of random weights in several files."""
    path.mkdir()
    named = list(weights(config, dtype=dtype).items())
    index = {}
    for i in range(shards):
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        save_file(dict(named[i::shards]), path / file)
        index |= dict.fromkeys((name for name, _ in named[i::shards]), file)
    (path / INDEX).write_text(json.dumps({"weight_map": index}))
    (path / "config.json").write_text(json.dumps(write_hf_config(config.model)))
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
@pytest.mark.parametrize("fmt", ["w4a4", "w4a4_2d", "w4a16"])
def test_offline_equals_online(tmp_path, fmt, kind):
    config = recipe(fmt, kind)
    seen: list[tuple[int, int]] = []
    convert(source(tmp_path / "bf16", config), tmp_path / "nvfp4", config, progress=lambda *at: seen.append(at))
    groups = pack(resolve_plan(config), weights(config).items(), get_backend("reference", device="cpu", strict=False))
    online = {name: tensor for _, tensors in groups for name, tensor in tensors.items()}
    disk = Checkpoint(tmp_path / "nvfp4")
    assert compare({name: disk.read(name) for name in online}, online) is None
    extra = disk.names - online.keys()
    assert {name.rpartition(".")[2] for name in extra} == {"weight_scale_2", "input_scale"}
    assert seen[-1] == (len(shapes(config)),) * 2 and len(seen) == len(shapes(config))


def test_layout_is_that_of_modelopt(tmp_path):
    config = recipe("w4a4", alignment="off", kv_cache="fp8")
    convert(source(tmp_path / "bf16", config), tmp_path / "nvfp4", config)
    disk = Checkpoint(tmp_path / "nvfp4")
    scale, amax = disk.read(f"{EXPERT}.weight_scale_2"), disk.read(f"{EXPERT}.weight_amax")
    assert scale.dtype == torch.float32 and scale.item() == pytest.approx(amax.item() / 2688)
    assert scale.shape == disk.read(f"{EXPERT}.input_scale").shape == ()
    index = json.loads((tmp_path / "nvfp4" / INDEX).read_text())["weight_map"]
    assert index.keys() == {n for n in disk.names if not n.endswith("weight_amax")}
    for name, file in index.items():
        with safe_open(tmp_path / "nvfp4" / file, "pt") as handle:
            assert name in handle.keys()  # noqa: SIM118 not a dict
    hf = json.loads((tmp_path / "nvfp4" / "config.json").read_text())["quantization_config"]
    assert hf["quant_method"] == "modelopt" and hf["quant_algo"] == "NVFP4" and hf["kv_cache_scheme"]["num_bits"] == 8
    assert hf["ignore"] == ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]
    quant = json.loads((tmp_path / "nvfp4" / "hf_quant_config.json").read_text())["quantization"]
    assert quant["exclude_modules"] == hf["ignore"] and quant["group_size"] == 16
    assert quant["kv_cache_quant_algo"] == "FP8"
    assert (tmp_path / "nvfp4" / "tokenizer.json").is_file()
    assert read_hf_config(tmp_path / "nvfp4").num_experts == 3


def test_back_to_bf16_is_the_dequantized_weight(tmp_path):
    config = recipe("w4a4")
    convert(source(tmp_path / "bf16", config), tmp_path / "nvfp4", config)
    convert(tmp_path / "nvfp4", tmp_path / "again", config, "bf16")
    again, full = Checkpoint(tmp_path / "again"), weights(config)
    assert again.names == shapes(config).keys()
    plan = resolve_plan(config)
    for name, tensor in full.items():
        entry = plan.get(name.removesuffix(".weight"))
        if entry is None or not entry.quantized:
            assert torch.equal(again.read(name), tensor)
            continue
        q = read_quantized(Checkpoint(tmp_path / "nvfp4"), entry.name)
        assert torch.equal(again.read(name), q.dequantize(torch.bfloat16))
        error = (again.read(name).float() - tensor.float()).norm() / tensor.float().norm()
        assert 0.01 < error < 0.2  # NVFP4 of a normal matrix: about 0.1
    hf = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "quantization_config" not in hf and not (tmp_path / "again" / "hf_quant_config.json").exists()


def test_a_checkpoint_without_recorded_amax_is_read_from_weight_scale_2(tmp_path):
    config = recipe("w4a4")
    convert(source(tmp_path / "bf16", config), tmp_path / "nvfp4", config)
    exact = read_quantized(Checkpoint(tmp_path / "nvfp4"), EXPERT).dequantize()
    (tmp_path / "nvfp4" / "minite_amax.safetensors").unlink()
    derived = read_quantized(Checkpoint(tmp_path / "nvfp4"), EXPERT).dequantize()
    torch.testing.assert_close(derived, exact, rtol=3e-7, atol=0)


def test_fp32_sources_are_rounded_to_the_model_dtype(tmp_path):
    config = recipe("w4a4")
    convert(source(tmp_path / "fp32", config, dtype=torch.float32), tmp_path / "nvfp4", config)
    disk = Checkpoint(tmp_path / "nvfp4")
    wanted = weights(config, dtype=torch.float32)["model.norm.weight"].bfloat16()
    assert torch.equal(disk.read("model.norm.weight"), wanted)


def test_outer_scale():
    amax = torch.tensor([0.0, 1.0, 2688.0, 0.3])
    assert torch.equal(outer_scale(amax), torch.tensor([1.0, 1 / 2688, 1.0, 0.3]) / torch.tensor([1, 1, 1, 2688.0]))
    zero = {"weight": torch.zeros(1, 8, dtype=torch.uint8), "weight_scale": torch.zeros(1, 1).to(torch.float8_e4m3fn)}
    assert from_parts("nvfp4_1d", {**zero, "weight_amax": torch.tensor(0.0)}).dequantize().abs().max() == 0


@pytest.mark.parametrize(
    ("breakage", "text"),
    [
        (lambda p: [f.unlink() for f in p.glob("*.safetensors")], r"no \*\.safetensors file"),
        (lambda p: next(p.glob("*.safetensors")).unlink(), "is missing, but model.safetensors.index.json lists it"),
        (lambda p: (p / "model-00001-of-00002.safetensors").write_bytes(b"x" * 64), "damaged"),
        (lambda p: (p / "config.json").unlink(), r"config.json: not readable as JSON"),
        (lambda p: save_file({"extra": torch.ones(1)}, p / "extra.safetensors"), "extra is not a tensor of the recipe"),
        (
            lambda p: save_file({"model.norm.weight": torch.ones(3)}, p / "z.safetensors"),
            r"model.norm.weight: exported with shape \[3\]",
        ),
    ],
)
def test_faults_are_named_and_leave_nothing(tmp_path, breakage, text):
    config = recipe("w4a4")
    breakage(source(tmp_path / "bf16", config))
    with pytest.raises(UserError, match=text):
        convert(tmp_path / "bf16", tmp_path / "nvfp4", config)
    assert [p.name for p in tmp_path.iterdir()] == ["bf16"]


def test_an_existing_target_is_left_alone(tmp_path):
    config = recipe("w4a4")
    source(tmp_path / "bf16", config)
    (tmp_path / "nvfp4").mkdir()
    with pytest.raises(UserError, match="nvfp4: exists already"):
        convert(tmp_path / "bf16", tmp_path / "nvfp4", config)
    assert list((tmp_path / "nvfp4").iterdir()) == []


@pytest.mark.parametrize(("fmt", "text"), [("bf16", "nothing is quantized"), ("w8a8", "mxfp8 x"), ("w4a8", "x mxfp8")])
def test_plans_that_modelopt_cannot_express(fmt, text):
    with pytest.raises(UserError, match=f"no ModelOpt NVFP4 layout: .*{text}"):
        quantization_config(resolve_plan(recipe(fmt)))


def test_writer_cuts_files_and_reads_back(tmp_path):
    tensors = {f"t{i}": torch.full((i + 1, 16), float(i)) for i in range(9)}
    with CheckpointWriter(tmp_path / "out", file_bytes=600) as writer:
        for name, tensor in tensors.items():
            writer.add(name, tensor)
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 3 and all(f.stat().st_size < 600 + 400 for f in files[:-1])
    disk = Checkpoint(tmp_path / "out")
    assert compare({n: disk.read(n) for n in disk.names}, tensors) is None
    with pytest.raises(UserError, match="has no tensor nothing"):
        disk.read("nothing")
