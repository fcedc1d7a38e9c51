"""What miniTE promises of files and settings that others wrote; ports and the secrets of a run: test_mistakes.py."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path

import pytest

from minite.cli import main
from minite.config.schema import RunConfig
from minite.config.secrets import looks_secret
from minite.driver.tokenizer import HuggingFaceTokenizer
from minite.errors import UserError
from tests.driver.tiny_run import recipe
from tests.test_imports import FILES, ROOT

UNSAFE = {
    "pickle.load", "pickle.loads", "yaml.load", "yaml.full_load", "yaml.unsafe_load", "eval", "exec", "os.system",
}  # fmt: skip
ALLOWED = {
    # the schedulers' record of a comparison: a file in a folder of this process's own, written by its own children
    ("minite/sampler/sglang/engine.py", "torch.load(weights_only=False)"),
    # questions that the driver made, on their way through a pipe to the process that it started for their scorers
    ("minite/driver/reasoning.py", "pickle.loads"),
}


def unsafe_calls(source: str) -> set[str]:
    """Calls that run what a file, a model or a string says, or that listen on every network."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and node.value in ("0.0.0.0", "::"):
            found.add(node.value)
        if not isinstance(node, ast.Call):
            continue
        name, given = ast.unparse(node.func), {k.arg: ast.unparse(k.value) for k in node.keywords}
        if name in UNSAFE:
            found.add(name)
        if name == "torch.load" and given.get("weights_only") != "True":
            found.add(f"torch.load(weights_only={given.get('weights_only')})")
        found |= {f"{key}=True" for key in ("trust_remote_code", "allow_pickle", "shell") if given.get(key) == "True"}
    return found


def test_nothing_that_a_file_says_is_run() -> None:
    files = [*FILES, *(ROOT / "slime_plugin").rglob("*.py")]
    found = {(str(f.relative_to(ROOT)), call) for f in files for call in unsafe_calls(f.read_text(encoding="utf-8"))}
    assert found == ALLOWED


@pytest.mark.parametrize(
    "line",
    ["pickle.load(f)", "torch.load(f)", "yaml.load(f, L)", "f(trust_remote_code=True)", "s.bind(('0.0.0.0', 1))",
     "eval(x)", "np.load(f, allow_pickle=True)", "run(c, shell=True)"],
)  # fmt: skip
def test_the_check_sees(line: str) -> None:
    assert len(unsafe_calls(line)) == 1 and not unsafe_calls("torch.load(f, weights_only=True)\nmodel.eval()")


def test_a_tokenizer_that_brings_code_does_not_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Mine", "auto_map": {"AutoTokenizer": ["mine.Mine", None]}})
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none", "auto_map": {"AutoConfig": "mine.Mine"}}))
    (tmp_path / "mine.py").write_text("open('exploded', 'w')\nclass Mine: pass\n")
    with pytest.raises(UserError, match="transformers cannot read"):
        HuggingFaceTokenizer(tmp_path)
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize(
    "option",
    ["slime.extra=[--wandb-key, hush-4a7c]", "slime.extra=[--hf-token=hush-4a7c]", "driver.wandb_api_key=hush-4a7c",
     "data.hf_token=hush-4a7c"],
)  # fmt: skip
def test_a_secret_in_a_recipe_is_refused_and_not_repeated(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", str(recipe(tmp_path)), "--run-dir", str(tmp_path / "run"), "-o", option]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "hush" not in err and " -o " in err
    assert not (tmp_path / "run").exists()


def test_no_setting_of_ours_looks_like_a_secret() -> None:
    def names(cls: type) -> list[str]:
        return [f.name for f in dataclasses.fields(cls)]

    sections = [f.default_factory for f in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(f.default_factory)]
    ours = [name for cls in (RunConfig, *sections) for name in names(cls)]
    assert len(ours) > 80 and not [name for name in ours if looks_secret(name)]
    flags = "--input-key --label-key --rollout-stop-token-ids --max-tokens-per-gpu --calculate-per-token-loss"
    assert not [flag for flag in flags.split() if looks_secret(flag)]
    assert all(map(looks_secret, ("WANDB_API_KEY", "--wandb-key", "HF_TOKEN", "hf-token", "password", "aws_secret")))
