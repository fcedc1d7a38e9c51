"""`minite gap` on recipes and runs: the same gap that a run would see, prompts of a file, one factor at a time."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from minite.cli import main
from minite.config import load_recipe, resolve_plan
from minite.driver import checkpoint, rundir
from minite.driver.gap import local
from minite.driver.gap.causes import allowed, changes
from minite.driver.gap.local import pair
from minite.driver.gap.subject import open_subject, read_prompts
from minite.errors import UserError
from tests.driver.tiny_run import ROOT, recipe

COLD = ["-o", "warm_start.steps=0", "-o", "model.init_std=0.3"]


def test_a_recipe_as_json_and_page(tmp_path: Path, capsys) -> None:
    page = tmp_path / "gap.html"
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "1+2="}\n\n{"prompt": "4+4=", "answer": "8"}\n')
    arguments = [*COLD, "-o", "precision.alignment=strict", "--prompts", str(prompts), "--layers", "--causes"]
    assert main(["gap", str(recipe(tmp_path)), "--json", "--html", str(page), *arguments]) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["gap"]["parts"]["response"]) == 2 * 4  # prompts x group size
    assert found["gap"]["summary"]["abs_max"] <= 1e-8
    assert found["layers"]["first"] is None
    by_factor = {c["factor"]: c for c in found["causes"]}
    assert by_factor["outer scale of activations"]["change"] == "nvfp4_tensor (alignment off)"
    assert by_factor["outer scale of activations"]["summary"]["abs_mean"] > 1e-4
    assert by_factor["KV cache"]["summary"]["abs_mean"] > 1e-4
    assert by_factor["batch composition"]["summary"]["abs_max"] <= 1e-8
    assert "By position" in page.read_text()


@pytest.mark.parametrize("fault", [None, RuntimeError("in between")])
def test_both_engines_are_closed(monkeypatch, fault) -> None:
    """An SGLang engine has processes of its own, which would pile up over the factors of --causes."""
    closed: list[str] = []

    def made(name: str) -> Any:
        return SimpleNamespace(close=lambda: closed.append(name))

    monkeypatch.setattr(local, "start_learner", lambda config, plan: made("learner"))
    monkeypatch.setattr(local, "make_engine", lambda config, plan: made("engine"))
    with contextlib.suppress(RuntimeError), pair(None, None):
        if fault is not None:
            raise fault
    assert closed == ["engine", "learner"]


def test_a_run_gives_its_newest_weights(tmp_path: Path) -> None:
    """Its checkpoint, else the weights it began with, else those that its recipe makes."""
    config = load_recipe(recipe(tmp_path), ["warm_start.steps=0", "precision.alignment=strict"])
    plan, run = resolve_plan(config), tmp_path / "run"
    rundir.create(run, config, plan)
    notes: list[str] = []

    def digest() -> str:
        subject = open_subject(run, [], None, notes.append)
        with pair(subject.config, subject.plan) as engines:
            subject.load(engines.worker)
            exported = engines.worker.export()
            assert exported is not None
            return exported[1].weight_digest

    random = digest()
    with pair(config, plan) as engines:
        engines.worker._policy.model.decoder.final_layernorm.weight.data.mul_(2)
        engines.worker._policy.weights_loaded()
        engines.worker.save_hf(run / rundir.START)
    begun = digest()
    assert begun != random
    assert notes[-1] == f"weights: {run / rundir.START}, the run has no checkpoint yet"


def test_a_run_whose_checkpoints_do_not_serve_is_refused(tmp_path: Path) -> None:
    """As by a resume: neither the weights that it began with instead, nor a traceback."""
    config, run = load_recipe(recipe(tmp_path)), tmp_path / "run"
    rundir.create(run, config, resolve_plan(config))
    folder = checkpoint.write_checkpoint(run, 2, lambda folder: None, {"step": 2})
    with pytest.raises(UserError, match="step_00000002: state.json has no 'weight_digest'"):
        open_subject(run, [], None, print)
    (folder / "state.json").write_text("{}")
    with pytest.raises(UserError, match="every checkpoint is damaged"):
        open_subject(run, [], None, print)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").glob("tiny_*.yaml")), ids=lambda p: p.stem)
def test_every_change_of_every_recipe_is_one_that_a_plan_takes(path: Path) -> None:
    config = load_recipe(path)
    factors = [factor for factor, change, changed in changes(config) if resolve_plan(allowed(changed, change)[0])]
    assert {"KV cache", "router replay", "LM head", "batch composition"} <= set(factors)
    quantized = "bf16" not in path.stem
    assert ("weights" in factors, "attention linears" in factors) == (quantized, quantized)
    assert ("activations" in factors) == ("w4a4" in path.stem or "w4a8" in path.stem)
    assert ("outer scale of activations" in factors) == ("w4a4" in path.stem)
    assert ("sum order" in factors) == (path.stem.split("_")[-2] not in ("strict", "unaligned", "fp8kv"))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.txt", " \n\n", "holds no prompt"),
        ("a.jsonl", '{"prompt": 3}\n', "expected"),
        ("a.jsonl", "1+2=\n", "is not JSON|expected"),
    ],
)
def test_prompts_that_are_none(tmp_path: Path, name: str, text: str, message: str) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name)


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    path, long = recipe(tmp_path), tmp_path / "long.txt"
    long.write_text("1" * 40)
    with pytest.raises(UserError, match="has 40 tokens; expected 1 to 28"):
        open_subject(path, ["warm_start.steps=0"], long, print)
    with pytest.raises(UserError, match="one learner process"):
        open_subject(path, ["learner.tensor_parallel=2"], None, print)
    with pytest.raises(UserError, match="is not a run directory"):
        open_subject(tmp_path, [], None, print)
