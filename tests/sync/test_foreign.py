"""Checkpoints that others exported: whatever their names and shapes, the codes are found and mean what they meant."""

import json
import math

import pytest
import torch
from disk_model import run, tensors_of
from foreign_model import INPUT_SCALE, directory, fuse, quantized, stack_experts, tensors
from safetensors.torch import load_file, save_file
from small_model import recipe, shapes, weights

from minite.errors import UserError
from minite.formats import conventions
from minite.formats.conventions import CONVENTIONS
from minite.sync.checkpoint import Checkpoint
from minite.sync.digests import verify_directory
from minite.sync.source import AMAX_FILE, Held, Source
from minite.sync.stored import to_parts
from minite.sync.verify import compare

FORMS = {
    "split": lambda named: named,
    "fused": fuse,
    "stacked": lambda named: stack_experts(named, 3),
    "fused and stacked": lambda named: stack_experts(fuse(named), 3),
}
GATE, UP, DOWN = (f"model.layers.1.mlp.experts.2.{x}_proj" for x in ("gate", "up", "down"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("convention", ["modelopt", "compressed_tensors"])
def test_codes_scales_and_values_are_those_that_were_exported(tmp_path, convention, form):
    config = recipe("w4a4")
    path = directory(tmp_path / "d", config, FORMS[form](tensors(config, convention)))
    source = Source(Checkpoint(path), shapes(config))
    assert source.unknown() == []
    for module, q in quantized(config).items():
        held = source.read(f"{module}.weight")
        assert isinstance(held, Held) and held.q.bytes_equal(q), module  # the BF16 amax is found again exactly
        outer = CONVENTIONS[convention].outer_of(q.amax)
        wanted = conventions.dequantize(q.codes, q.block_scale, outer, convention)
        assert torch.equal(held.dequantize(torch.bfloat16), wanted.to(torch.bfloat16))
    for name, tensor in weights(config).items():
        if name.removesuffix(".weight") not in quantized(config):
            assert torch.equal(source.read(name), tensor)


@pytest.mark.parametrize("form", FORMS)
def test_plain_weights_are_found_in_every_form(tmp_path, form):
    config = recipe("w4a4")
    path = directory(tmp_path / "d", config, FORMS[form](weights(config)))
    run(path, tmp_path / "out", config, "bf16")
    assert compare(tensors_of(tmp_path / "out"), weights(config)) is None


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("convention", ["modelopt", "compressed_tensors"])
def test_into_modelopts_layout_with_the_codes_verbatim(tmp_path, convention, form):
    config = recipe("w4a4")
    report = run(directory(tmp_path / "d", config, FORMS[form](tensors(config, convention))), tmp_path / "out", config)
    assert report.untied == [] and report.inputs == {} and verify_directory(tmp_path / "out") is None
    disk = Checkpoint(tmp_path / "out")
    disk.add_file(AMAX_FILE)
    for module, q in quantized(config).items():
        parts = to_parts(q)
        assert compare({s: disk.read(f"{module}.{s}") for s in parts}, parts) is None
        assert float(disk.read(f"{module}.input_scale")) == INPUT_SCALE  # a calibrated one is kept


def mixed(config):
    """What a careless exporter writes: every linear with its own outer scale."""
    return tensors(config, tied=False)


def test_two_outer_scales_of_a_pair_are_kept_and_the_cost_is_told(tmp_path):
    config = recipe("w4a4")
    report = run(directory(tmp_path / "d", config, fuse(mixed(config))), tmp_path / "out", config)
    disk, own = Source(Checkpoint(tmp_path / "out"), shapes(config)), quantized(config, tied=False)
    for module, q in own.items():
        assert disk.read(f"{module}.weight").q.bytes_equal(q)
    costs = {cost.tensor: cost for cost in report.untied}
    assert not report.shared and {GATE, UP} <= costs.keys() and not any(name.endswith("down_proj") for name in costs)
    assert {costs[GATE].ratio == 1.0, costs[UP].ratio == 1.0} == {True, False}
    told = json.loads((tmp_path / "out" / "minite_report.json").read_text())
    assert {cost["tensor"] for cost in told["untied"]} == costs.keys()


def test_a_shared_outer_scale_leaves_every_code_and_costs_what_it_says(tmp_path):
    config = recipe("w4a4")
    path = directory(tmp_path / "d", config, mixed(config))
    report = run(path, tmp_path / "out", config, outer_scales="shared")
    disk, own = Source(Checkpoint(tmp_path / "out"), shapes(config)), quantized(config, tied=False)
    costs = {cost.tensor: cost for cost in report.untied}
    assert report.shared and verify_directory(tmp_path / "out") is None
    assert float(disk.read(f"{GATE}.weight").outer) == float(disk.read(f"{UP}.weight").outer)
    for module, q in own.items():
        held = disk.read(f"{module}.weight")
        assert torch.equal(held.q.codes, q.codes)
        before, after = q.dequantize(torch.float64), held.q.dequantize(torch.float64)
        worst = ((after - before).abs() / before.abs().clamp_min(1e-30))[before != 0].max()
        # The values are products rounded to float32, hence the slack.
        assert worst <= (costs[module].max_relative if module in costs else 0.0) + 1e-6, module


@pytest.mark.parametrize("bad", [0.0, math.nan, math.inf, -1.0, None])
@pytest.mark.parametrize("convention", ["modelopt", "compressed_tensors"])
def test_an_expert_without_calibration_gets_its_siblings_input_scale(tmp_path, convention, bad):
    config = recipe("w4a4")
    named = tensors(config, convention)
    name = f"{UP}.{'input_scale' if convention == 'modelopt' else 'input_global_scale'}"
    named[name] = torch.tensor([math.nan if bad is None else bad]).reshape(named[name].shape)
    if bad is None:
        del named[name]
    report = run(directory(tmp_path / "d", config, named), tmp_path / "out", config)
    assert report.inputs == {UP: "missing" if bad is None else str(bad)}
    assert float(Checkpoint(tmp_path / "out").read(f"{UP}.input_scale")) == INPUT_SCALE


def test_of_several_siblings_the_largest_input_scale_is_taken(tmp_path):
    """Of all experts of the layer, of this projection only, whatever their order."""
    config = recipe("w4a4")
    named = tensors(config)
    for expert, value in ((0, 0.75), (1, 0.5)):
        named[f"{UP.replace('experts.2', f'experts.{expert}')}.input_scale"] = torch.tensor(value)
        named[f"{DOWN.replace('experts.2', f'experts.{expert}')}.input_scale"] = torch.tensor(9.0)
    named[f"{UP}.input_scale"] = torch.tensor(0.0)
    run(directory(tmp_path / "d", config, named), tmp_path / "out", config)
    assert float(Checkpoint(tmp_path / "out").read(f"{UP}.input_scale")) == 0.75


def test_no_input_scales_at_all_are_no_fault(tmp_path):
    config = recipe("w4a16")
    named = {name: t for name, t in tensors(config).items() if not name.endswith("input_scale")}
    assert run(directory(tmp_path / "d", config, named), tmp_path / "out", config).inputs == {}
    assert float(Checkpoint(tmp_path / "out").read(f"{UP}.input_scale")) == 1.0


def nan_scale(named):
    named[f"{UP}.weight_scale"].view(torch.uint8)[3, 1] = 0xFF


def put(name, tensor):
    """Replace a tensor; None removes it."""

    def change(named):
        named[name] = tensor
        if tensor is None:
            del named[name]

    return change


def padded(named):
    scale = named[f"{UP}.weight_scale"]
    named[f"{UP}.weight_scale"] = torch.zeros(128, scale.shape[1], dtype=torch.uint8).view(torch.float8_e4m3fn)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (nan_scale, f"{UP}.weight_scale holds NaN"),
        (padded, rf"{UP}.weight_scale is \[128, 4\]; the recipe's model has \[32, 4\], without padding"),
        (
            put(f"{UP}.weight_scale", torch.ones(32, 4)),
            f"{UP}.weight_scale is F32; expected F8_E4M3",
        ),
        (put(f"{UP}.weight_scale_2", None), f"{UP}.weight_scale_2 is missing"),
        (put(f"{UP}.weight_scale_2", torch.tensor(0.0)), f"{UP}.weight_scale_2 is 0.0; expected a positive"),
        (put(f"{UP}.weight_scale_2", torch.tensor(math.nan)), "is nan; expected a positive"),
        (put(f"{UP}.weight_scale_2", torch.ones(2)), r"is F32 \[2\]; expected F32, one number per"),
        (put(f"{UP}.weight_scale_2", torch.ones((), dtype=torch.float64)), r"is F64 \[\]; expected F32"),
        (
            put(f"{DOWN}.weight_scale", None),
            f"{DOWN}.weight is U8; expected BF16, .* or a known quantization with all its parts",
        ),
        (put(f"{UP}.weight", None), f"{UP} is not there"),
        (put(f"{UP.replace('up', 'gate_up')}.weight", torch.ones(64, 64)), "is stored twice, as"),
        (put("model.layers.0.mlp.gate.weight", torch.zeros(3, 64, dtype=torch.int8)), "is I8; expected"),
        (put("model.layers.0.self_attn.q_proj.bias", torch.ones(64)), "q_proj.bias is not a tensor of the recipe's"),
        (put(f"{UP}.pre_quant_scale", torch.ones(64)), "pre_quant_scale is not a tensor of the recipe's model"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, change, text):
    config = recipe("w4a4")
    named = {name: tensor.clone() for name, tensor in tensors(config).items()}
    change(named)
    path = directory(tmp_path / "d", config, named)
    for to in ("nvfp4", "bf16"):
        with pytest.raises(UserError, match=text):
            run(path, tmp_path / "out", config, to)
    assert [p.name for p in tmp_path.iterdir()] == ["d"]


def test_a_module_quantized_against_the_recipe_is_named(tmp_path):
    narrow = [{"layers": [0], "use": "bf16"}, {"match": "**.mlp.gate", "use": "bf16"}]
    rules = [*narrow, {"match": "model.layers.**", "use": "w4a4"}, {"match": "**", "use": "bf16"}]
    path = directory(tmp_path / "d", recipe("w4a4"), tensors(recipe("w4a4")))
    with pytest.raises(UserError, match="layers.0.self_attn.q_proj is quantized .*, but the recipe keeps it BF16"):
        run(path, tmp_path / "out", recipe("w4a4", rules=rules))


def test_a_group_of_which_a_part_is_quantized_is_named(tmp_path):
    config = recipe("w4a4")
    named = {n: t for n, t in tensors(config).items() if not n.startswith(f"{UP}.")}
    named[f"{UP}.weight"] = weights(config)[f"{UP}.weight"]
    with pytest.raises(UserError, match=f"{GATE} is quantized, but {UP} of the same fusion group is not"):
        run(directory(tmp_path / "d", config, named), tmp_path / "out", config)


def test_an_outer_scale_that_another_program_changed(tmp_path):
    """minite_amax.safetensors then is of other weights, and must not win."""
    config = recipe("w4a4")
    run(directory(tmp_path / "d", config, tensors(config)), tmp_path / "out", config)
    file = tmp_path / "out" / "model-00001-of-00001.safetensors"
    named = load_file(file)
    named[f"{UP}.weight_scale_2"] *= 2
    save_file(named, file)
    with pytest.raises(UserError, match=f"{UP}: its weight_scale_2 .* is not that of its amax .*; remove minite_amax"):
        run(tmp_path / "out", tmp_path / "again", config, "bf16")
    (tmp_path / "out" / AMAX_FILE).unlink()
    run(tmp_path / "out", tmp_path / "again", config, "bf16")
    q = quantized(config)[UP]
    assert torch.equal(Checkpoint(tmp_path / "again").read(f"{UP}.weight"), 2 * q.dequantize(torch.bfloat16))


def test_sharing_needs_something_to_share(tmp_path):
    config = recipe("w4a4")
    path = directory(tmp_path / "d", config, weights(config))
    with pytest.raises(UserError, match="outer scales can be shared only from NVFP4 to nvfp4"):
        run(path, tmp_path / "out", config, outer_scales="shared")
