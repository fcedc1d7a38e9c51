"""sync.convert meets what users and strangers bring: refused in one line where the result would be wrong, or written
where it would be right."""

import json
import os
import stat

import pytest
import torch
from disk_model import run, save, source, tensors_of
from foreign_model import stack_experts
from safetensors.torch import load_file, save_file
from small_model import recipe, weights

from minite.errors import UserError
from minite.sync.checkpoint import INDEX, CheckpointWriter
from minite.sync.inspect import inspect_directory
from minite.sync.verify import compare

Q = "model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize("to", ["nvfp4", "bf16"])
def test_fp8_without_a_scale_is_no_weight(tmp_path, to):
    """Its values are off by a factor that nobody knows: float8 is a floating type, but not one of plain weights."""
    config = recipe("w4a4")
    named = weights(config)
    named[f"{Q}.weight"] = named[f"{Q}.weight"].to(torch.float8_e4m3fn)
    path = save(tmp_path / "d", named, config)
    with pytest.raises(UserError, match=f"{Q}.weight is F8_E4M3; expected BF16, .* with all its parts"):
        run(path, tmp_path / "out", config, to)
    assert [f.rule for f in inspect_directory(path).findings if f.where == Q and f.severity == "error"] == [
        "missing-part"
    ]


def test_fp8_whose_scale_got_lost_is_no_weight(tmp_path):
    config = recipe("w4a4")
    run(source(tmp_path / "bf16", config), tmp_path / "fp8", config, "fp8")
    refilled(tmp_path / "fp8", lambda named: named.pop(f"{Q}.weight_scale_inv"))
    with pytest.raises(UserError, match=f"{Q}.weight is F8_E4M3"):
        run(tmp_path / "fp8", tmp_path / "out", config, "bf16")
    assert inspect_directory(tmp_path / "fp8").broken


def refilled(path, change):
    """The one file of a converted directory with other tensors, and no index."""
    file = path / "model-00001-of-00001.safetensors"
    named = load_file(file)
    change(named)
    save_file(named, file)
    (path / INDEX).unlink()
    return path


def test_fp8_scales_may_be_bf16(tmp_path):
    """Some exporters store them so; they mean what they say."""
    config, scale = recipe("w4a4"), f"{Q}.weight_scale_inv"
    run(source(tmp_path / "bf16", config), tmp_path / "fp8", config, "fp8")
    refilled(tmp_path / "fp8", lambda named: named.update({scale: named[scale].bfloat16()}))
    run(tmp_path / "fp8", tmp_path / "out", config, "bf16")
    stored = tensors_of(tmp_path / "fp8")
    wanted = stored[f"{Q}.weight"].float() * stored[scale].float()  # [64, 64] is one block
    assert torch.equal(tensors_of(tmp_path / "out")[f"{Q}.weight"], wanted.bfloat16())


def test_a_fused_fp8_module_is_cut_only_between_blocks(tmp_path):
    """q, k, v of 64, 32, 32 rows share one 128x128 block, whose scale is of them all: k begins inside it."""
    config = recipe("w4a4")
    run(source(tmp_path / "bf16", config), tmp_path / "fp8", config, "fp8")

    def fuse(named):
        head = Q.removesuffix("q_proj")
        parts = [named.pop(f"{head}{leaf}.weight").view(torch.uint8) for leaf in ("q_proj", "k_proj", "v_proj")]
        scales = [named.pop(f"{head}{leaf}.weight_scale_inv") for leaf in ("q_proj", "k_proj", "v_proj")]
        named[f"{head}qkv_proj.weight"] = torch.cat(parts).view(torch.float8_e4m3fn)
        named[f"{head}qkv_proj.weight_scale_inv"] = scales[0]

    refilled(tmp_path / "fp8", fuse)
    with pytest.raises(UserError, match="k_proj starts at row 64 of .*qkv_proj, inside a 128x128 block"):
        run(tmp_path / "fp8", tmp_path / "out", config, "bf16")


@pytest.mark.parametrize("tied", [True, False])
def test_tying_is_that_of_the_recipe(tmp_path, tied):
    """A recipe that ties would drop lm_head, and config.json still ask for it."""
    config = recipe("w4a4")
    path = save(tmp_path / "d", weights(config), config, tie_word_embeddings=tied)
    if not tied:
        run(path, tmp_path / "out", config)
        return
    with pytest.raises(
        UserError, match="tie_word_embeddings is true, but model.tie_word_embeddings of the recipe is not"
    ):
        run(path, tmp_path / "out", config)


def test_a_stack_with_more_experts_than_the_recipe_is_another_model(tmp_path):
    config = recipe("w4a4")
    named = stack_experts(weights(config), 3)
    for name in [name for name in named if ".experts." in name]:
        named[name] = torch.cat([named[name], named[name][:1]])
    with pytest.raises(UserError, match=r"gate_proj is \[4, 32, 64\]; the recipe's model has \[3, 32, 64\]"):
        run(save(tmp_path / "d", named, config), tmp_path / "out", config)


@pytest.mark.parametrize("name", ["tokenizer.json", "config.json"])
def test_no_file_is_read_through_a_link_that_leads_out(tmp_path, name):
    config = recipe("w4a4")
    path = source(tmp_path / "d", config)
    (path / name).rename(tmp_path / "elsewhere.json")
    (path / name).symlink_to(tmp_path / "elsewhere.json")
    with pytest.raises(UserError, match=f"{name}: leads to .*elsewhere.json; expected a file in"):
        run(path, tmp_path / "out", config)
    assert not (tmp_path / "out").exists() and not (tmp_path / "out.partial").exists()


def test_a_snapshot_of_a_hugging_face_cache(tmp_path):
    """All files of it are links to blobs, and the user may come by a link to it."""
    config = recipe("w4a4")
    plain = source(tmp_path / "plain", config)
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "1f"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted(plain.iterdir())):
        (blobs / f"{i:040x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(f"../../blobs/{i:040x}")
    (tmp_path / "link").symlink_to(snapshot)
    run(tmp_path / "link", tmp_path / "out", config)
    run(plain, tmp_path / "wanted", config)
    assert compare(tensors_of(tmp_path / "out"), tensors_of(tmp_path / "wanted")) is None
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}" and not (
        tmp_path / "out" / "config.json"
    ).is_symlink()


@pytest.mark.parametrize("target", [".", "/", "", "file/out", "file", "n" * 250, "/proc/out"])
def test_targets_that_cannot_be(tmp_path, monkeypatch, target):
    config = recipe("w4a4")
    source(tmp_path / "bf16", config)
    (tmp_path / "file").write_text("")
    (tmp_path / "file2.partial").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in (target, "file2"):
        with pytest.raises(UserError, match="exists already|then the same command goes on"):
            run(tmp_path / "bf16", name, config)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bf16", "file", "file2.partial"]


def test_new_files_have_the_mode_that_the_umask_leaves(tmp_path):
    config = recipe("w4a4")
    with CheckpointWriter(tmp_path / "bf16") as writer:
        for name, tensor in weights(config).items():
            writer.add(name, tensor)
        writer.write_json("config.json", {})
    before = os.umask(0o027)
    try:
        run(tmp_path / "bf16", tmp_path / "out", config)
    finally:
        os.umask(before)
    modes = {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "out").iterdir()}
    assert modes == {0o640}
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "bf16").iterdir()} == {0o666 & ~before}


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
def test_config_names_the_dtype_that_is_written(tmp_path, key):
    config = recipe("w4a4")
    save(tmp_path / "d", weights(config, dtype=torch.float16), config, **{key: "float16"})
    run(tmp_path / "d", tmp_path / "out", config, "bf16")
    assert json.loads((tmp_path / "out" / "config.json").read_text())[key] == "bfloat16"
    assert {t.dtype for t in tensors_of(tmp_path / "out").values()} == {torch.bfloat16}
