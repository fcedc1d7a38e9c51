"""The command line: arguments arrive, mistakes are one line and exit code 2, nothing heavy is imported."""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from minite import __version__, cli
from minite.backends.bench_quantize import Rate
from minite.driver.bench import PHASES, StepTimes
from minite.errors import ProcessDied, UserError

ROOT = Path(__file__).parents[1]
TINY = str(ROOT / "recipes" / "tiny_qwen3_moe_w4a4_grpo.yaml")
LARGE = str(ROOT / "recipes" / "qwen3_30b_a3b_w4a4_grpo.yaml")
PARSERS = next(a.choices for a in cli.make_parser()._actions if isinstance(a, argparse._SubParsersAction))
COMMANDS = list(PARSERS)


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "minite.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100, **options)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_an_example(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main([command, "--help"])
    assert caught.value.code == 0
    assert f"examples:\n  minite {command}" in capsys.readouterr().out


def test_help_names_every_command_and_version_prints(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, expected in ((["--help"], COMMANDS), (["--version"], [f"minite {__version__}"])):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        shown = capsys.readouterr().out
        assert all(word in shown for word in expected)


def test_help_has_one_sentence_for_a_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert {"plan", "train", "eval", "sensitivity", "bench"} <= set(COMMANDS)
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    listed = capsys.readouterr().out.partition("commands:")[2]
    assert "keep the worst of them in BF16\n" in listed and "Scores the text" not in listed and ". " not in listed


MISTAKES = [
    ([], "the following arguments are required: COMMAND; see minite --help"),
    (["trian", TINY], "invalid choice: 'trian'"),
    (["train"], "required: RECIPE; see minite train --help"),
    (["train", TINY, "--steps", "many"], "--steps: invalid int value: 'many'"),
    (["train", TINY, "--steps", "0"], "driver.steps is 0: expected at least 1"),
    (["plan"], "no recipe given"),
    (["plan", TINY, "--memory", "268", "--json"], "got --memory and --json; give one of them"),
    (["plan", TINY, "--memory", "-5"], "--memory: -5 is no memory of a GPU"),
    (["plan", TINY, "--memory", "abc"], "--memory: abc is no memory of a GPU"),
    (["plan", TINY, "--memory", "nan"], "--memory: nan is no memory of a GPU"),
    (["eval", "CKPT", "--recipe", TINY, "--limit", "3"], "--limit: only tasks of lm-eval take it, got --tasks text"),
    (["plan", "recipes/tiny_qwen3_moe_w4a4_grp.yaml"], "no such recipe.*nearest is 'tiny_qwen3_moe_w4a4_grpo.yaml'"),
    (["plan", TINY, "-o", "precision.kv_cash=fp8"], "unknown key.*nearest is 'kv_cache'"),
    (["plan", TINY, "-o", "nonsense"], "expected -o section.key=value"),
    (["resume", "no/such/run"], "no/such/run"),
    (["report", "no/such/run"], "no/such/run"),
    (["bench", "sleep"], "invalid choice: 'sleep'"),
    (["bench", "quantize", TINY], "got a recipe or -o, which it does not read"),
    (["bench", "step", "--turns", "0"], "--turns: 0 is less than 1"),
    (["bench", "gemm", TINY], "got a recipe or -o, which it does not read"),
    (["bench", "gemm", "--turns", "3"], "bench gemm: got --turns, which it does not read"),
    (["bench", "learner", "--json", "x.json"], "bench learner: got --json, which it does not read"),
    (["bench", "step", "--gpu", "h200"], "bench step: got --gpu, which it does not read"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert cli.main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert re.fullmatch(f"minite: error: .*{message}.*\n", shown.err)


def test_a_message_of_several_lines_becomes_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise UserError("first\nsecond")

    monkeypatch.setattr("minite.config.load_recipe", fail)
    assert cli.main(["plan", TINY]) == 2
    assert capsys.readouterr().err == "minite: error: first second\n"


@pytest.mark.parametrize(("error", "code"), [(KeyboardInterrupt(), 130), (UserError("x"), 2), (ProcessDied("x"), 1)])
def test_exit_codes(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr("minite.config.load_recipe", fail)
    assert cli.main(["plan", TINY]) == code


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("minite.config.load_recipe", fail)
    with pytest.raises(ZeroDivisionError):
        cli.main(["plan", TINY])


def test_module_and_script_report_a_mistake_alike() -> None:
    result = run("plan", "nowhere.yaml")
    assert result.returncode == 2 and result.stdout == ""
    assert re.fullmatch(r"minite: error: nowhere.yaml: .*\n", result.stderr)


def test_train_passes_recipe_overrides_and_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("minite.driver.loop.train", lambda config, run_dir: seen.append((config, run_dir)))
    monkeypatch.chdir(tmp_path)
    options = ["-o", "driver.steps=9", "-o", "learner.lr=0.5", "--steps", "3"]
    assert cli.main(["train", TINY, *options, "--run-dir", "here"]) == 0
    assert cli.main(["train", TINY]) == 0
    (first, first_dir), (second, second_dir) = seen
    assert (first.driver.steps, first.learner.lr, first_dir) == (3, 0.5, Path("here"))
    assert re.fullmatch(rf"runs/{second.name}-\d{{8}}-\d{{6}}", str(second_dir))


def test_resume_passes_run_and_overrides(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("minite.driver.loop.resume", lambda *arguments: seen.append(arguments))
    assert cli.main(["resume", "runs/a", "-o", "driver.steps=9"]) == 0
    assert seen == [(Path("runs/a"), ("driver.steps=9",))]


def test_convert_passes_directories_recipe_and_format(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from minite.sync.convert import Report
    from minite.sync.reconcile import ScaleCost

    seen: list[Any] = []

    def convert(source: Path, target: Path, config: Any, quantizer: Any, to: str, **options: Any) -> Report:
        seen.append((source, target, config.name, quantizer.strict, to, options["outer_scales"]))
        for done in range(1, 37):
            options["progress"](done * 1_000_000, 36_000_000)
        return Report([ScaleCost("x.up_proj", 0.5, 0.03, 0.01, 0)], False, {"y": "nan"})

    monkeypatch.setattr("minite.sync.convert.convert", convert)
    assert cli.main(["convert", "a", "b", "--recipe", TINY, "--to", "bf16"]) == 0
    assert seen == [(Path("a"), Path("b"), "tiny_qwen3_moe_w4a4_grpo", False, "bf16", "keep")]
    shown = capsys.readouterr()
    assert shown.out == "b\n"
    lines = shown.err.splitlines()
    assert len(lines) == 12 and re.fullmatch(r"b: 36 of 36 MB, [\d,]+ MB/s", lines[9])
    assert re.search(r"several outer scales, which kept several.* 3.00% \(x.up_proj\)", lines[10])
    assert "1 input scales were unusable" in lines[11] and "y was nan" in lines[11]


def test_report_prints_the_page_it_wrote(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "reward/mean": 0.5}\n{"step": 1, "reward/mean": 0.75}\n')
    assert cli.main(["report", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'report.html'}\n"
    assert "0.75" in (tmp_path / "report.html").read_text()


def test_plan_of_the_large_model_takes_under_two_seconds_and_no_torch() -> None:
    program = (
        "import sys; from minite.cli import main; code = main(sys.argv[1:]); "
        "heavy = {'torch', 'ray', 'megatron', 'transformers'} & set(sys.modules); sys.exit(code or str(heavy or ''))"
    )
    untraced = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE")}
    command = [sys.executable, "-c", program, "plan", LARGE]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=untraced)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert result.stderr.strip() == ""
    assert "model.layers.[1-46].mlp.experts.[0-127].gate_proj" in result.stdout
    # Processor time, which does not depend on what else the machine does; wall time on an idle one is the same.
    assert (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime) < 2.0


def test_plan_json_is_the_whole_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", TINY, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert len(data["digest"]) == 64 and len(data["modules"]) > 10
    assert cli.main(["plan", TINY, "--json", "-o", "precision.alignment=strict"]) == 0
    assert json.loads(capsys.readouterr().out)["digest"] != data["digest"]


def test_plan_schema_shows_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--schema"]) == 0
    shown = capsys.readouterr().out
    assert all(f"class {name}" in shown for name in ("ModelConfig", "PrecisionConfig", "DriverConfig", "RunConfig"))


def test_a_closed_pipe_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "minite.cli", "plan", LARGE, "--json"]
    result = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, cwd=ROOT, timeout=100)
    os.close(writer)
    assert (result.returncode, result.stderr) == (0, "")


def test_bench_step_passes_recipe_and_turns_and_prints_both_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def measure_steps(config: Any, turns: int) -> StepTimes:
        seen.append((config.name, config.seed, turns))
        return StepTimes(config.name, turns, dict.fromkeys(PHASES, 0.003), dict.fromkeys(PHASES, 0.002))

    monkeypatch.setattr("minite.driver.bench.measure_steps", measure_steps)
    monkeypatch.setattr("minite.backends.bench.SHAPES_MNK", ((32, 64, 32),))
    assert cli.main(["bench", "step"]) == 0
    assert cli.main(["bench", "step", LARGE, "--turns", "2", "-o", "seed=3"]) == 0
    assert seen == [("tiny_qwen3_moe_w4a4_grpo", 0, 5), ("qwen3_30b_a3b_w4a4_grpo", 3, 2)]
    shown = capsys.readouterr().out
    assert re.search(r"logprob +3\.0 +2\.0 +1\.50", shown) and "32 x 64 x 32" in shown


def test_bench_quantize_prints_its_table_and_writes_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rates = [Rate("copy", "torch", 1.0, 10.0, 1.0, 1.0), Rate("quantize nvfp4_1d", "cpu", 2.0, 3.0, 0.3, 0.5)]
    monkeypatch.setattr("minite.backends.bench_quantize.measure", lambda turns: rates[: turns + 1])
    assert cli.main(["bench", "quantize", "--turns", "1", "--json", str(tmp_path / "rates.json")]) == 0
    assert "30.0% of the copy (cpu), within the bound of 25%" in capsys.readouterr().out
    assert json.loads((tmp_path / "rates.json").read_text())["quantize"][1]["gb_per_s"] == 3.0


def test_doctor_exits_with_1_when_a_check_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for healthy, code in ((True, 0), (False, 1)):
        monkeypatch.setattr("minite.backends.doctor.examine", lambda result=healthy: ("report", result))
        assert cli.main(["doctor"]) == code
        assert capsys.readouterr().out == "report\n"
