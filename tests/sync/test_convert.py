"""sync.convert: what is written is what a learner would send, in each format, and comes back as what was read."""

import json

import pytest
import torch
from disk_model import REFERENCE, contents, run, source, tensors_of
from safetensors import safe_open
from safetensors.torch import save_file
from small_model import recipe, shapes, weights

from minite.config import resolve_plan
from minite.errors import UserError
from minite.formats import quantize_operand
from minite.models.hf_config import read_hf_config
from minite.sync.checkpoint import INDEX, Checkpoint
from minite.sync.digests import DIGEST_FILE, verify_directory
from minite.sync.export import pack
from minite.sync.modelopt import outer_scale, quantization_config
from minite.sync.source import AMAX_FILE, Held, Source
from minite.sync.stored import from_parts
from minite.sync.verify import Digest, compare

EXPERT = "model.layers.1.mlp.experts.0.up_proj"


def online(config) -> dict[str, torch.Tensor]:
    groups = pack(resolve_plan(config), weights(config).items(), REFERENCE)
    return {name: tensor for _, tensors in groups for name, tensor in tensors.items()}


def disk_of(path) -> Checkpoint:
    disk = Checkpoint(path)
    disk.add_file(AMAX_FILE)
    return disk


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama"])
@pytest.mark.parametrize("fmt", ["w4a4", "w4a4_2d", "w4a16"])
def test_offline_equals_online(tmp_path, fmt, kind):
    config = recipe(fmt, kind)
    seen: list[tuple[int, int]] = []
    run(source(tmp_path / "bf16", config), tmp_path / "nvfp4", config, progress=lambda *at: seen.append(at))
    sent, disk = online(config), disk_of(tmp_path / "nvfp4")
    assert compare({name: disk.read(name) for name in sent}, sent) is None
    extra = disk.names - sent.keys()
    assert {name.rpartition(".")[2] for name in extra} == {"weight_scale_2", "input_scale"}
    total = 2 * sum(torch.Size(shape).numel() for shape in shapes(config).values())
    assert seen[-1] == (total, total) and seen == sorted(seen)


@pytest.mark.parametrize("fmt", ["w4a4", "w4a4_2d", "w4a16"])
def test_digest_is_that_of_a_learners_weights(tmp_path, fmt):
    config, digest = recipe(fmt), Digest()
    run(source(tmp_path / "bf16", config), tmp_path / "nvfp4", config)
    for name, tensor in online(config).items():
        digest.update(name, tensor)
    told = json.loads((tmp_path / "nvfp4" / DIGEST_FILE).read_text())
    assert told["tensors"] == digest.parts and told["digest"] == digest.hexdigest()
    assert told["plan_digest"] == resolve_plan(config).digest
    assert told["source"] == Checkpoint(tmp_path / "bf16").fingerprint()


def test_layout_is_that_of_modelopt(tmp_path):
    config = recipe("w4a4", alignment="off", kv_cache="fp8")
    run(source(tmp_path / "bf16", config), tmp_path / "nvfp4", config)
    disk = disk_of(tmp_path / "nvfp4")
    scale, amax = disk.read(f"{EXPERT}.weight_scale_2"), disk.read(f"{EXPERT}.weight_amax")
    assert scale.dtype == torch.float32 and scale.item() == pytest.approx(amax.item() / 2688)
    assert scale.shape == disk.read(f"{EXPERT}.input_scale").shape == ()
    for layer in range(2):
        for name in ("k_proj.k_scale", "v_proj.v_scale"):
            assert torch.equal(disk.read(f"model.layers.{layer}.self_attn.{name}"), torch.tensor(1.0))
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
    assert verify_directory(tmp_path / "nvfp4") is None


def test_without_an_fp8_cache_there_are_no_kv_scales(tmp_path):
    config = recipe("w4a4")
    run(source(tmp_path / "bf16", config), tmp_path / "nvfp4", config)
    assert not [name for name in Checkpoint(tmp_path / "nvfp4").names if name.endswith(("k_scale", "v_scale"))]


def test_modules_that_stay_are_named_as_engines_build_them():
    config = recipe("w4a4")
    rules = [{"match": "**.experts.**", "use": "bf16"}, {"layers": [0], "use": "bf16"}]
    config = recipe("w4a4", rules=[*rules, *({"match": r.match, "use": r.use} for r in config.precision.rules)])
    ignored = quantization_config(resolve_plan(config))["ignore"]
    attention = "model.layers.0.self_attn"
    assert {f"{attention}.q_proj", f"{attention}.qkv_proj", "model.layers.1.mlp.experts", "lm_head"} <= set(ignored)
    assert "model.layers.1.self_attn.qkv_proj" not in ignored and len(ignored) == len(set(ignored))


def test_back_to_bf16_is_the_dequantized_weight(tmp_path):
    config = recipe("w4a4")
    run(source(tmp_path / "bf16", config), tmp_path / "nvfp4", config)
    run(tmp_path / "nvfp4", tmp_path / "again", config, "bf16")
    again, full = Checkpoint(tmp_path / "again"), weights(config)
    assert again.names == shapes(config).keys()
    plan = resolve_plan(config)
    stored = Source(Checkpoint(tmp_path / "nvfp4"), shapes(config))
    for name, tensor in full.items():
        entry = plan.get(name.removesuffix(".weight"))
        if entry is None or not entry.quantized:
            assert torch.equal(again.read(name), tensor)
            continue
        held = stored.read(name)
        assert isinstance(held, Held) and held.recorded
        assert torch.equal(again.read(name), held.q.dequantize(torch.bfloat16))
        error = (again.read(name).float() - tensor.float()).norm() / tensor.float().norm()
        assert 0.01 < error < 0.2  # NVFP4 of a normal matrix: about 0.1
    hf = json.loads((tmp_path / "again" / "config.json").read_text())
    assert "quantization_config" not in hf and not (tmp_path / "again" / "hf_quant_config.json").exists()
    assert verify_directory(tmp_path / "again") is None


def test_nvfp4_to_nvfp4_changes_no_byte_of_a_tensor(tmp_path):
    config = recipe("w4a4", alignment="off", kv_cache="fp8")
    run(source(tmp_path / "bf16", config), tmp_path / "nvfp4", config)
    report = run(tmp_path / "nvfp4", tmp_path / "again", config)
    first, second = contents(tmp_path / "nvfp4"), contents(tmp_path / "again")
    assert first.keys() == second.keys() and report.untied == [] and report.inputs == {}
    assert all(first[name] == second[name] for name in first if name != DIGEST_FILE)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_fp8_blocks_and_back(tmp_path, kind):
    config = recipe("w4a4", kind)
    run(source(tmp_path / "bf16", config), tmp_path / "fp8", config, "fp8")
    plan, full, disk = resolve_plan(config), weights(config), Checkpoint(tmp_path / "fp8")
    quantized = [e for e in plan if e.quantized]
    for entry in quantized:
        codes, scale = disk.read(f"{entry.name}.weight"), disk.read(f"{entry.name}.weight_scale_inv")
        wanted = quantize_operand(full[f"{entry.name}.weight"], "fp8_128x128")
        assert torch.equal(codes.view(torch.uint8), wanted.codes) and torch.equal(scale, wanted.block_scale)
        assert codes.dtype == torch.float8_e4m3fn and scale.shape == (-(-entry.n // 128), -(-entry.k // 128))
    hf = json.loads((tmp_path / "fp8" / "config.json").read_text())["quantization_config"]
    assert hf["quant_method"] == "fp8" and hf["weight_block_size"] == [128, 128]
    assert hf["modules_to_not_convert"] == [e.name for e in plan if not e.quantized]
    assert verify_directory(tmp_path / "fp8") is None
    run(tmp_path / "fp8", tmp_path / "again", config, "bf16")
    again = Checkpoint(tmp_path / "again")
    for entry in quantized:
        wanted = quantize_operand(full[f"{entry.name}.weight"], "fp8_128x128")
        assert torch.equal(again.read(f"{entry.name}.weight"), wanted.dequantize(torch.bfloat16))


def test_fp32_sources_are_rounded_to_the_model_dtype(tmp_path):
    config = recipe("w4a4")
    run(source(tmp_path / "fp32", config, dtype=torch.float32), tmp_path / "nvfp4", config)
    wanted = weights(config, dtype=torch.float32)["model.norm.weight"].bfloat16()
    assert torch.equal(Checkpoint(tmp_path / "nvfp4").read("model.norm.weight"), wanted)


def test_files_are_cut_between_groups_and_do_not_change_what_is_read(tmp_path):
    config = recipe("w4a4")
    source(tmp_path / "bf16", config)
    run(tmp_path / "bf16", tmp_path / "one", config)
    run(tmp_path / "bf16", tmp_path / "many", config, file_bytes=9_000)
    assert len(list((tmp_path / "many").glob("model-*"))) > 5
    assert compare(tensors_of(tmp_path / "one"), tensors_of(tmp_path / "many")) is None
    digests = [json.loads((tmp_path / name / DIGEST_FILE).read_text()) for name in ("one", "many")]
    assert digests[0] == digests[1]


def test_outer_scale():
    amax = torch.tensor([0.0, 1.0, 2688.0, 0.3])
    assert torch.equal(outer_scale(amax), torch.tensor([1.0, 1 / 2688, 1.0, 0.3]) / torch.tensor([1, 1, 1, 2688.0]))
    zero = {"weight": torch.zeros(1, 8, dtype=torch.uint8), "weight_scale": torch.zeros(1, 1).to(torch.float8_e4m3fn)}
    assert from_parts("nvfp4_1d", {**zero, "weight_amax": torch.tensor(0.0)}).dequantize().abs().max() == 0


@pytest.mark.parametrize(
    ("breakage", "text"),
    [
        (lambda p: [f.unlink() for f in (*p.glob("*.safetensors"), p / INDEX)], r"no \*\.safetensors file"),
        (lambda p: next(p.glob("*.safetensors")).unlink(), "is missing, but model.safetensors.index.json lists it"),
        (lambda p: (p / "model-00001-of-00002.safetensors").write_bytes(b"x" * 64), "damaged"),
        (lambda p: (p / "config.json").unlink(), r"config.json: not readable as JSON"),
        (lambda p: add(p, {"extra": torch.ones(1)}), "extra is not a tensor of the recipe"),
        (lambda p: add(p, {"model.norm.weight": torch.ones(3)}), "model.norm.weight is in both"),
        (
            lambda p: change(p, "model.norm.weight", torch.ones(3)),
            r"norm.weight is \[3\]; the recipe's model has",
        ),
        (lambda p: change(p, f"{EXPERT}.weight", torch.full((32, 64), torch.nan)), f"{EXPERT}.weight: holds NaN"),
        (lambda p: change(p, f"{EXPERT}.weight", torch.ones(33, 64)), r"is \[33, 64\]"),
        (lambda p: change(p, f"{EXPERT}.weight", torch.ones(32, 64, dtype=torch.int32)), "is I32; expected BF16"),
        (lambda p: change(p, f"{EXPERT}.weight", None), f"{EXPERT} is not there"),
    ],
)
def test_faults_are_named_and_leave_nothing(tmp_path, breakage, text):
    config = recipe("w4a4")
    breakage(source(tmp_path / "bf16", config))
    with pytest.raises(UserError, match=text):
        run(tmp_path / "bf16", tmp_path / "nvfp4", config)
    assert [p.name for p in tmp_path.iterdir()] == ["bf16"]


def add(path, tensors) -> None:
    """One more file, listed."""
    save_file(tensors, path / "more.safetensors")
    index = json.loads((path / INDEX).read_text())
    index["weight_map"] |= dict.fromkeys(tensors, "more.safetensors")
    (path / INDEX).write_text(json.dumps(index))


def change(path, name, tensor) -> None:
    """Replace a tensor in its file, or remove it."""
    index = json.loads((path / INDEX).read_text())
    file = path / index["weight_map"][name]
    with safe_open(file, "pt") as handle:
        tensors = {key: handle.get_tensor(key).clone() for key in handle.keys()}  # noqa: SIM118 not a dict
    if tensor is None:
        del tensors[name], index["weight_map"][name]
    else:
        tensors[name] = tensor
    save_file(tensors, file)
    (path / INDEX).write_text(json.dumps(index))


def test_an_existing_target_is_left_alone(tmp_path):
    config = recipe("w4a4")
    source(tmp_path / "bf16", config)
    (tmp_path / "nvfp4").mkdir()
    with pytest.raises(UserError, match="nvfp4: exists already"):
        run(tmp_path / "bf16", tmp_path / "nvfp4", config)
    assert list((tmp_path / "nvfp4").iterdir()) == []


@pytest.mark.parametrize(
    ("first", "second", "text"),
    [
        ("nvfp4", "fp8", r"is quantized already \(modelopt\); convert it --to bf16 first"),
        ("fp8", "nvfp4", r"is quantized already \(fp8\); convert it --to bf16 first"),
        ("fp8", "fp8", r"is quantized already \(fp8\)"),
    ],
)
def test_nothing_is_quantized_twice(tmp_path, first, second, text):
    config = recipe("w4a4")
    run(source(tmp_path / "bf16", config), tmp_path / "first", config, first)
    with pytest.raises(UserError, match=text):
        run(tmp_path / "first", tmp_path / "second", config, second)


@pytest.mark.parametrize(("fmt", "text"), [("bf16", "nothing is quantized"), ("w8a8", "mxfp8 x"), ("w4a8", "x mxfp8")])
def test_plans_that_modelopt_cannot_express(fmt, text):
    with pytest.raises(UserError, match=f"no ModelOpt NVFP4 layout: .*{text}"):
        quantization_config(resolve_plan(recipe(fmt)))


def test_a_plan_that_quantizes_nothing_has_no_fp8_checkpoint(tmp_path):
    config = recipe("bf16")
    with pytest.raises(UserError, match="quantizes no weight"):
        run(source(tmp_path / "bf16", config), tmp_path / "fp8", config, "fp8")
    assert not (tmp_path / "fp8.partial").exists()
