"""Which linears a plan loses most by: found where they were planted."""

from __future__ import annotations

import json

import pytest
import torch
import yaml
from tiny_checkpoint import config, recipe, write_checkpoint
from tokenizers import pre_tokenizers

from minite.cli import main
from minite.config import load_recipe, resolve_plan
from minite.errors import UserError
from minite.evaluation import subject, text
from minite.evaluation.sensitivity import groups_of, keep, measure, recipe_rules, table

TEXT = "a" * 400
PLANTED = "model.layers.1.self_attn.o_proj.weight"
LEARNT = 1.0  # [nats/token] at most, of 5.6 without any knowledge


def quiet(line: str) -> None:
    pass


def planted(name: str, weights: dict[str, torch.Tensor]) -> torch.Tensor:
    """A model that is sure of the next "a", because the tied LM head finds what it embedded. FP4 holds every weight but
    those of one o_proj: each block is 1 and 15 times -1/15, which cancel until the small ones become -1/12."""
    w = weights[name]
    if name == PLANTED:
        block = torch.tensor([1.0] + [-1 / 15] * 15)
        return w[:, :1].sign() * 0.1 * block.repeat(w.shape[1] // 16)
    if name.endswith("v_proj.weight"):  # all values of a head alike
        a = sorted(pre_tokenizers.ByteLevel.alphabet()).index("a")
        return weights["model.embed_tokens.weight"][a].sign().expand_as(w) / 8
    return w.sign() / 512 if name.endswith("_proj.weight") else w


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("planted") / "tiny"
    write_checkpoint(directory, planted)
    return directory


@pytest.fixture(autouse=True)
def short_text(monkeypatch):
    monkeypatch.setattr(text, "source", lambda: TEXT)
    monkeypatch.setattr(text, "WINDOW", 64)


def test_groups_cover_what_is_quantized_once(tmp_path, checkpoint):
    made = config(tmp_path, checkpoint, "nvfp4_1d", "nvfp4_row")
    quantized = [e for e in resolve_plan(made) if e.quantized]
    for parts, count in ((1, 4), (2, 8), (3, 8)):  # two layers cannot be cut in three
        groups = groups_of(made, parts)
        assert len(groups) == count and sum(g.weights for g in groups) == sum(e.n * e.k for e in quantized)
    with pytest.raises(UserError, match="made: its plan quantizes no linear"):
        groups_of(config(tmp_path, checkpoint), 3)


def test_the_planted_group_is_found_and_kept(tmp_path, checkpoint):
    made = config(tmp_path, checkpoint, "nvfp4_1d")
    measured = measure(checkpoint, made, 2, 2, quiet)
    assert measured.score(frozenset()).mean < LEARNT
    (found,) = (g for g in measured.groups if f"{g.modules[0]}.weight" == PLANTED.replace("1", "*") and 1 in g.layers)
    for group in measured.groups:
        alone = measured.cost(frozenset({group}))[0]
        assert (alone > 0.5 and measured.saves(group) > 0.5) if group is found else abs(alone) < 1e-3
    first, *others = table(measured).splitlines()[4:]
    assert first.startswith("| o | 1 | 6.7% | +") and len(others) == 7
    assert keep(measured, 0.01) == {found} and keep(measured, 9.0) == frozenset()
    with pytest.raises(UserError, match="--budget -1: not met with every linear in BF16"):
        keep(measured, -1.0)
    left = yaml.safe_load(recipe_rules(measured, measured.all))["precision"]["rules"]  # none that decides nothing
    assert left[-1] == {"match": "**", "use": "bf16"} and all(rule["use"] == "bf16" for rule in left)


def test_the_printed_rules_are_a_recipe_that_keeps_the_budget(tmp_path, checkpoint, capsys):
    path = recipe(tmp_path, "w4", checkpoint, "nvfp4_1d")
    command = ["sensitivity", str(checkpoint), "--recipe", str(path), "--windows", "1", "--parts", "2"]
    assert main([*command, "--budget", "0.01"]) == 0
    out, err = capsys.readouterr()
    assert "8 of 8 groups quantized: " in err
    printed = out[out.index("# ") :]
    assert "93.3% of the weights that w4 quantizes stay so" in printed
    assert '    - {match: "model.layers.*.self_attn.o_proj", layers: [1], use: bf16}\n' in printed
    chosen = yaml.safe_load(printed)["precision"]["rules"]
    mixed = load_recipe(path, [f"precision.rules={json.dumps(chosen)}"])
    assert text.score(subject.load(checkpoint, mixed), quiet, 1).mean < LEARNT
    assert text.score(subject.load(checkpoint, load_recipe(path)), quiet, 1).mean > LEARNT + 0.5
