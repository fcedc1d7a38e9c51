"""sync.inspect: every rule is found where it is broken and nowhere else, with the right severity."""

import json
import math

import pytest
import torch
from disk_model import run, source
from foreign_model import directory, fuse, stack_experts, tensors
from safetensors.torch import load_file, save_file
from small_model import recipe, weights

from minite import cli
from minite.errors import UserError
from minite.sync import disk
from minite.sync.inspect import inspect_directory
from minite.sync.inspect.ignore import _segments
from minite.sync.inspect.scales import ScaleStats

CONFIG = recipe("w4a4")
GATE, UP, DOWN = (f"model.layers.1.mlp.experts.2.{x}_proj" for x in ("gate", "up", "down"))
IGNORED = ["model.layers.0.mlp.gate", "model.layers.1.mlp.gate", "lm_head"]
GROUPS = {"group_0": {"input_activations": {"num_bits": 4}, "weights": {"num_bits": 4}, "targets": ["Linear"]}}


def quantization(ignore=IGNORED, **extra):
    return {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": list(ignore), "config_groups": GROUPS, **extra}


def found(path, *, notes=False) -> dict[tuple[str, str], list[str]]:
    """(severity, rule) -> places; notes left out, which the small shapes give for every module."""
    result: dict[tuple[str, str], list[str]] = {}
    for finding in inspect_directory(path).findings:
        if notes or finding.severity != "note":
            result.setdefault((finding.severity, finding.rule), []).append(finding.where)
    return result


def exported(path, named, config=None, other=None):
    """A ModelOpt checkpoint with a quantization_config of its own."""
    directory(path, CONFIG, named)
    hf = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**hf, "quantization_config": config or quantization()}))
    if other is not None:
        (path / "hf_quant_config.json").write_text(json.dumps({"quantization": other}))
    return path


@pytest.mark.parametrize("to", ["nvfp4", "fp8", "bf16"])
def test_what_minite_writes_breaks_no_rule_and_verifies(tmp_path, to):
    run(source(tmp_path / "source", CONFIG), tmp_path / "out", CONFIG, to)
    inspection = inspect_directory(tmp_path / "out", verify=True)
    assert not [f for f in inspection.findings if f.severity != "note"] and inspection.verified
    formats = {name: module.format for name, module in inspection.modules.items()}
    assert formats[UP] == {"nvfp4": "NVFP4 ModelOpt", "fp8": "FP8 128x128", "bf16": "BF16"}[to]
    assert formats["lm_head"] == "BF16" and len(formats) == len(weights(CONFIG))


def test_a_tied_model_breaks_no_rule(tmp_path):
    """No file has an lm_head, but engines build one and look for it in the list."""
    config = recipe("w4a4", tied=True)
    run(source(tmp_path / "source", config), tmp_path / "out", config)
    inspection = inspect_directory(tmp_path / "out")
    assert "lm_head" not in inspection.modules and not [f for f in inspection.findings if f.severity != "note"]
    told = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "lm_head" in told["quantization_config"]["ignore"] and told["tie_word_embeddings"]


@pytest.mark.parametrize("form", [lambda t: t, fuse, lambda t: stack_experts(fuse(t), 3)])
@pytest.mark.parametrize("convention", ["modelopt", "compressed_tensors"])
def test_others_in_every_form(tmp_path, convention, form):
    assert found(exported(tmp_path / "tied", form(tensors(CONFIG, convention)))) == {}
    untied = found(exported(tmp_path / "untied", form(tensors(CONFIG, convention, tied=False))))
    assert untied.keys() == {("error", "outer-scales-differ")}
    places = set(untied["error", "outer-scales-differ"])
    assert "model.layers.0.self_attn.qkv_proj" in places
    assert len(places) == 2 + (2 if any("experts.gate_up" in place for place in places) else 6)


def test_statistics_against_a_plain_count(tmp_path):
    named = {name: tensor.clone() for name, tensor in tensors(CONFIG).items()}
    scale, codes = named[f"{UP}.weight_scale"].view(torch.uint8), named[f"{UP}.weight"]
    scale[0, :2], scale[1, 0], codes[1, :8] = 0, 0x7E, 0
    codes[0, 8:16] = 0x88  # block of negative zeros under a scale of 0: zero, not underflow
    codes[0, :8] = 0x11
    measured = inspect_directory(exported(tmp_path / "d", named)).stats[UP]
    wanted = ScaleStats(blocks=scale.numel())
    for row in range(scale.shape[0]):
        for column in range(scale.shape[1]):
            block, s = codes[row, column * 8 : column * 8 + 8], int(scale[row, column])
            is_zero = all(int(byte) & 0x77 == 0 for byte in block)
            wanted.zero += is_zero
            wanted.underflowed += s == 0 and not is_zero
            wanted.saturated += s == 0x7E
    assert (measured.blocks, measured.zero, measured.underflowed) == (wanted.blocks, wanted.zero, wanted.underflowed)
    assert measured.saturated == wanted.saturated > 0 and measured.underflowed == 1 and measured.nan == 0
    assert measured.outer == (float(named[f"{UP}.weight_scale_2"]),) and measured.input == (0.25,)


def test_pieces_do_not_change_the_statistics(tmp_path, monkeypatch):
    path = exported(tmp_path / "d", stack_experts(fuse(tensors(CONFIG)), 3))
    whole = inspect_directory(path).stats
    monkeypatch.setattr("minite.sync.inspect.scales.PIECE", 100)
    assert inspect_directory(path).stats == whole


def put(name, tensor):
    def change(named):
        named[name] = tensor(named[name]) if callable(tensor) else tensor
        if named[name] is None:
            del named[name]

    return change


def set_byte(part, value):
    def change(named):
        named[f"{UP}.{part}"].view(torch.uint8)[3, 1] = value

    return change


SCALE = f"{UP}.weight_scale"
BROKEN = [
    (set_byte("weight_scale", 0x7F), "error", "nan-scale"),
    (set_byte("weight_scale", 0x91), "error", "negative-scale"),
    (put(SCALE, lambda t: t.float()), "error", "scale-dtype"),
    (put(SCALE, lambda t: t.view(torch.uint8)), "error", "scale-dtype"),
    (put(SCALE, torch.zeros(128, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)), "error", "padding"),
    (put(SCALE, torch.zeros(32, 3, dtype=torch.uint8).view(torch.float8_e4m3fn)), "error", "scale-shape"),
    (put(SCALE, None), "error", "missing-part"),
    (put(f"{UP}.weight_scale_2", None), "error", "missing-part"),
    (put(f"{UP}.weight_scale_2", lambda t: t.double()), "error", "scale-dtype"),
    (put(f"{UP}.weight_scale_2", torch.ones(7)), "error", "scale-shape"),
    (put(f"{UP}.input_scale", torch.ones(7)), "error", "scale-shape"),
    (put(f"{UP}.weight", None), "error", "missing-part"),
    (put(f"{UP}.weight", lambda t: t.int()), "error", "codes"),
    (put(f"{UP}.weight", lambda t: t[:, :30].contiguous()), "error", "k-multiple"),
    (put(f"{DOWN}.weight_scale_2", torch.tensor(0.0)), "error", "outer-scale"),
    (put(f"{DOWN}.weight_scale_2", torch.tensor(math.nan)), "error", "outer-scale"),
    (put(f"{UP}.input_scale", None), "warning", "input-scale"),
    (put(f"{UP}.input_scale", torch.tensor(0.0)), "warning", "input-scale"),
    (put(f"{UP}.input_scale", torch.tensor(math.nan)), "error", "input-scale"),
    (put(f"{UP}.input_scale", torch.tensor(-2.0)), "error", "input-scale"),
]


@pytest.mark.parametrize(("change", "severity", "rule"), BROKEN, ids=[f"{i}-{b[2]}" for i, b in enumerate(BROKEN)])
def test_a_broken_rule_is_found_where_it_is(tmp_path, change, severity, rule):
    named = {name: tensor.clone() for name, tensor in tensors(CONFIG).items()}
    change(named)
    result = found(exported(tmp_path / "d", named))
    assert result.keys() == {(severity, rule)}
    assert result[severity, rule] == [DOWN if rule == "outer-scale" else UP]


def test_a_weight_of_zeros_is_a_note(tmp_path):
    named = {name: tensor.clone() for name, tensor in tensors(CONFIG).items()}
    named[f"{DOWN}.weight"].zero_(), named[f"{DOWN}.weight_scale"].view(torch.uint8).zero_()
    assert found(exported(tmp_path / "d", named), notes=True)["note", "all-zero"] == [DOWN]


LISTS = [
    (IGNORED[:2], [("error", "unlisted", "lm_head")]),
    ([*IGNORED, UP], [("error", "listed-but-quantized", UP)]),
    ([*IGNORED, IGNORED[0]], [("warning", "listed-twice", IGNORED[0])]),
    ([*IGNORED, "model.layers.7.mlp.gate"], [("warning", "names-nothing", "model.layers.7.mlp.gate")]),
    (["mlp.gate", "lm_head"], []),  # whole segments within a name
    (["*mlp.gate", "lm_head"], []),
    (["re:.*mlp.gate$", "re:lm_head"], []),
    (["re:(a+)+b", *IGNORED], [("warning", "pattern", "re:(a+)+b")]),
    (["re:(", *IGNORED], [("warning", "pattern", "re:(")]),
    (["re:a?a?a?a?b", *IGNORED], [("warning", "pattern", "re:a?a?a?a?b")]),  # with 30 of them: for ever
    (["re:(a|a)(a|a)(a|a)(a|a)b", *IGNORED], [("warning", "pattern", "re:(a|a)(a|a)(a|a)(a|a)b")]),
    (["re:(model.)?layers", *IGNORED], [("warning", "pattern", "re:(model.)?layers")]),
    (["re:.*?mlp.gate$", "re:.*(lm_head|embed).*?$"], []),
    (["model.layers.*.mlp.gate*", "lm_head"], []),
    (["gate", "lm_head"], [("warning", "substring", "gate")]),
    ([*IGNORED, f"{GATE}"[:-5]], [("warning", "names-nothing", GATE[:-5]), ("warning", "substring", GATE[:-5])]),
    ([*IGNORED, "model.layers.0.self_attn"], [("error", "listed-but-quantized", "model.layers.0.self_attn.q_proj")]),
]


@pytest.mark.parametrize(("ignored", "wanted"), LISTS, ids=[str(i) for i in range(len(LISTS))])
def test_lists_of_modules_that_are_not_quantized(tmp_path, ignored, wanted):
    result = found(exported(tmp_path / "d", tensors(CONFIG), quantization(ignored)))
    assert result.keys() == {(severity, rule) for severity, rule, _ in wanted}
    assert all(place in result[severity, rule] for severity, rule, place in wanted)


def test_fused_names_in_a_list_stand_for_their_members(tmp_path):
    named = {n: t for n, t in tensors(CONFIG).items() if ".layers.0.self_attn." not in n}
    named |= {n: t for n, t in weights(CONFIG).items() if ".layers.0.self_attn." in n}
    attention = "model.layers.0.self_attn"
    members = [f"{attention}.{leaf}" for leaf in ("qkv_proj", "q_proj", "k_proj", "v_proj", "o_proj")]
    assert found(exported(tmp_path / "d", named, quantization([*IGNORED, *members]))) == {}


def test_two_lists_that_differ(tmp_path):
    other = {"quant_algo": "NVFP4", "exclude_modules": IGNORED[:2]}
    result = found(exported(tmp_path / "d", tensors(CONFIG), other=other))
    assert result == {("warning", "two-lists"): ["hf_quant_config.json"]}


def test_configs_that_contradict_the_files(tmp_path):
    assert found(directory(tmp_path / "a", CONFIG, tensors(CONFIG))).keys() == {("error", "no-config")}
    assert found(exported(tmp_path / "b", weights(CONFIG))).keys() == {("error", "no-codes")}


def test_segments():
    assert _segments("a.b.c") == {"a", "b", "c", "a.b", "b.c", "a.b.c"}


@pytest.mark.parametrize("part", ["weight_scale_2", "input_scale", "weight", "weight_amax"])
def test_verify_sees_a_changed_byte(tmp_path, part):
    run(source(tmp_path / "source", CONFIG), tmp_path / "out", CONFIG)
    file = tmp_path / "out" / ("minite_amax" if part == "weight_amax" else "model-00001-of-00001")
    tensors = load_file(f"{file}.safetensors")
    tensors[f"{DOWN}.{part}"].reshape(-1).view(torch.uint8)[0] ^= 1
    save_file(tensors, f"{file}.safetensors", metadata={"format": "pt"})
    wrong = [f for f in inspect_directory(tmp_path / "out", verify=True).findings if f.rule == "digest"]
    assert len(wrong) == 1 and f"{DOWN}.{part}: held bytes differ from those written" in wrong[0].what


def test_verify_sees_another_digest_of_the_whole(tmp_path):
    """It is what a weight sync announces, so it must be that of the tensors."""
    run(source(tmp_path / "source", CONFIG), tmp_path / "out", CONFIG)
    file = tmp_path / "out" / "minite_digest.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"digest": "0" * 32}))
    wrong = [f.what for f in inspect_directory(tmp_path / "out", verify=True).findings if f.rule == "digest"]
    assert len(wrong) == 1 and "its digest is not that of its tensors" in wrong[0]


def test_hashes_of_another_kind_are_told_from_damage(tmp_path):
    run(source(tmp_path / "source", CONFIG), tmp_path / "out", CONFIG)
    file = tmp_path / "out" / "minite_digest.json"
    told = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in told.items() if key != "hash"}))
    for read in (lambda path: inspect_directory(path, verify=True), disk.announced):
        with pytest.raises(UserError, match="its digests are of kind None, expected 'lanes64'.*convert the checkpoint"):
            read(tmp_path / "out")


def test_a_list_of_fp8_need_not_name_every_module(tmp_path):
    """Engines that read FP8 look at the weights: only some may fail on a module that no list names."""
    run(source(tmp_path / "source", CONFIG), tmp_path / "out", CONFIG, "fp8")
    data = json.loads((tmp_path / "out" / "config.json").read_text())
    data["quantization_config"]["modules_to_not_convert"] = IGNORED[:2]
    (tmp_path / "out" / "config.json").write_text(json.dumps(data))
    assert found(tmp_path / "out") == {("warning", "unlisted"): ["lm_head"]}


def test_nothing_to_verify_against(tmp_path):
    with pytest.raises(UserError, match="has no minite_digest.json"):
        inspect_directory(source(tmp_path / "d", CONFIG), verify=True)


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    ignored = [*IGNORED, "\x1b[31m", "\ud800", "a\nb", "ä"]
    text = inspect_directory(exported(tmp_path / "d", tensors(CONFIG), quantization(ignored))).text()
    assert all(line.isprintable() for line in text.split("\n")) and text.encode()
    assert all(seen in text for seen in ("\\x1b[31m", "\\ud800", "a\\nb", "ä"))


def test_a_directory_of_empty_tensors(tmp_path, capsys):
    save_file({"a.weight": torch.zeros(0, 4).to(torch.float8_e4m3fn), "a.weight_scale_inv": torch.zeros(0, 1)},
              tmp_path / "model.safetensors")  # fmt: skip
    assert cli.main(["inspect", str(tmp_path)]) == 2
    assert "error: no-config" in capsys.readouterr().out


def test_command_line(tmp_path, capsys):
    good = exported(tmp_path / "good", tensors(CONFIG))
    bad = exported(tmp_path / "bad", tensors(CONFIG, tied=False))
    assert cli.main(["inspect", str(good)]) == 0
    shown = capsys.readouterr().out
    assert "model.layers.[0-1].mlp.experts.[0-2].gate_proj  6" in shown and "note: unpadded" in shown
    assert cli.main(["inspect", str(bad)]) == 2
    shown = capsys.readouterr().out
    assert "error: outer-scales-differ: model.layers.[0-1].mlp.experts.[0-2].gate_up_proj (6 modules" in shown
    assert cli.main(["inspect", str(bad), "--json"]) == 2
    data = json.loads(capsys.readouterr().out)
    assert data["broken"] and data["modules"][UP]["shape"] == [32, 64]
    assert data["modules"][UP]["scales"]["blocks"] == 128
    assert cli.main(["inspect", str(tmp_path / "none")]) == 2
    assert "no *.safetensors file" in capsys.readouterr().err
