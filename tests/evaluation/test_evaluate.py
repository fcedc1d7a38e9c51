"""Loading under a plan, the tasks, and the command, on a tiny model with a real tokenizer."""

from __future__ import annotations

import gc
import json
import math
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_checkpoint import config, recipe, write_checkpoint

from minite.cli import main
from minite.config.schema import DataConfig, ModelConfig, RunConfig, SamplerConfig
from minite.driver.data import load_task
from minite.driver.tokenizer import CharTokenizer
from minite.errors import UserError
from minite.evaluation import evaluate as evaluation
from minite.evaluation import greedy, subject, text
from minite.evaluation.evaluate import evaluate
from minite.evaluation.tasks import TASKS
from minite.models.hf_config import read_hf_config

HF_NATS = 1e-5  # FP32 on both sides, two layers, mean over a window


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("evaluation") / "tiny"
    write_checkpoint(directory)
    return directory


@pytest.fixture(autouse=True)
def few_windows(monkeypatch):
    monkeypatch.setattr(text, "WINDOW", 96)
    monkeypatch.setattr(text, "WINDOWS", 5)


def quiet(line: str) -> None:
    pass


def test_text_scores_what_transformers_scores(checkpoint, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    outcome = TASKS["text"](subject.load(checkpoint, config(tmp_path, checkpoint)), quiet)
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
    ids = AutoTokenizer.from_pretrained(checkpoint).encode(text.source())[: 5 * 96]
    for value, window in zip(outcome.value_N, torch.tensor(ids).view(5, 96), strict=True):
        with torch.no_grad():
            loss = model(window[None], labels=window[None]).loss
        assert value == pytest.approx(float(loss), abs=HF_NATS)
    assert outcome.metric == "nats/token" and "5 windows of 96 tokens" in outcome.about


def test_windows_fit_the_model(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(text, "WINDOW", 1000)
    outcome = TASKS["text"](subject.load(checkpoint, config(tmp_path, checkpoint)), quiet)
    assert f"of {read_hf_config(checkpoint).max_seq_len} tokens" in outcome.about


def test_the_text_is_long_enough_for_every_window():
    """SmolLM2's tokenizer makes 4.1 characters a token of it; no tokenizer in use makes more than 5."""
    assert len(text.source()) > 5 * 512 * 40


def test_greedy_answers_continue_the_chat(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr(greedy, "MAX_NEW_TOKENS", 12)
    loaded = subject.load(checkpoint, config(tmp_path, checkpoint))
    outcome = TASKS["greedy"](loaded, quiet)
    assert [prompt for prompt, _ in outcome.samples] == list(greedy.PROMPTS)
    prompt = [*loaded.tokenizer.encode(greedy.PROMPTS[0]), loaded.tokenizer.eos_id]  # as TEMPLATE has it
    answer = loaded.greedy(greedy.PROMPTS[:1], 12)[0]
    assert answer and all(token != loaded.tokenizer.eos_id for token in answer)
    for i, token in enumerate(answer):
        rivals = [[*prompt, *answer[:i], other] for other in range(loaded.config.model.vocab_size)]
        scores = [scores[-1] for scores in loaded.logprobs(rivals)] if i in (0, len(answer) - 1) else None
        assert scores is None or scores[token] == pytest.approx(max(scores), abs=1e-5)


def test_distinct_share():
    assert greedy.distinct_share([1, 2, 3]) == 1.0
    assert greedy.distinct_share([1, 2, 3, 4, 5]) == 1.0
    assert greedy.distinct_share([7] * 11) == 1 / 8
    assert greedy.distinct_share([1, 2, 3, 4, 1, 2, 3, 4]) == 4 / 5
    assert greedy.distinct_share([1, 2, 3, 4, 1, 2, 3, 5]) == 1.0  # only three tokens come twice


def test_plans_change_the_value_and_pairs_are_of_the_same_windows(checkpoint, tmp_path):
    configs = [config(tmp_path, checkpoint, *f) for f in ((), ("nvfp4_1d",), ("nvfp4_1d", "nvfp4_row"), ())]
    exact, w4a16, w4a4, again = evaluate(checkpoint, configs, ["text"], quiet)
    assert exact.base is None and w4a16.base is exact.outcome and again.outcome == exact.outcome
    for result in (w4a16, w4a4):
        assert 1e-4 < abs(result.figures()["difference"]) < 0.5  # quantized, and not broken
    assert w4a16.outcome.value_N != w4a4.outcome.value_N
    assert again.figures()["difference_interval"] == (0.0, 0.0)
    assert len({exact.digest, w4a16.digest, w4a4.digest}) == 3 and again.digest == exact.digest


def test_a_model_is_gone_before_the_next_is_loaded(checkpoint, tmp_path, monkeypatch):
    loaded = []

    def load(*given):
        gc.collect()
        assert not any(engine() for engine in loaded)
        made = subject.load(*given)
        loaded.append(weakref.ref(made.engine))
        return made

    monkeypatch.setattr(evaluation, "load", load)
    evaluate(checkpoint, [config(tmp_path, checkpoint)] * 2, ["text"], quiet)
    assert len(loaded) == 2


def test_command(checkpoint, tmp_path, capsys):
    recipes = [str(recipe(tmp_path, "exact", checkpoint)), str(recipe(tmp_path, "w4", checkpoint, "nvfp4_2d"))]
    command = ["eval", str(checkpoint), "--recipe", *recipes]
    assert main([*command, "-o", "sampler.max_batch=8"]) == 0
    out, err = capsys.readouterr()
    assert "| recipe | nats/token [95 %] | perplexity | minus exact [95 %] |\n|---|---|---|---|\n| exact | " in out
    assert "w4 (2 of 2): loading" in err
    assert main([*command, "--json"]) == 0
    exact, w4 = json.loads(capsys.readouterr().out)
    assert len(w4["values"]) == 5 and w4["mean"] == pytest.approx(exact["mean"] + w4["difference"])
    assert w4["interval"][0] < w4["mean"] < w4["interval"][1]
    assert w4["perplexity"] == pytest.approx(math.exp(w4["mean"]))
    low, high = w4["difference_interval"]
    assert low <= w4["difference"] <= high
    assert f"| {w4['perplexity']:.3f} | {w4['difference']:+.4f} [{low:+.4f}, {high:+.4f}] |" in out


def test_mistakes(checkpoint, tmp_path, capsys):
    path = recipe(tmp_path, "exact", checkpoint)
    assert main(["eval", str(checkpoint), "--recipe", str(path), "--tasks", "txt"]) == 2
    known = "text, greedy, heldout, lm-eval:NAME"
    assert f"--tasks: 'txt' is no task; expected some of {known}; nearest is 'text'" in capsys.readouterr().err
    assert main(["eval", str(tmp_path), "--recipe", str(path)]) == 2
    assert "has no *.safetensors file" in capsys.readouterr().err
    with pytest.raises(UserError, match="model.rope_theta is 10000.0, but .*/config.json says 99"):
        (tmp_path / "other").mkdir()
        for file in checkpoint.iterdir():
            (tmp_path / "other" / file.name).write_bytes(file.read_bytes())
        data = json.loads((checkpoint / "config.json").read_text())
        (tmp_path / "other" / "config.json").write_text(json.dumps(data | {"rope_theta": 99.0}))
        subject.load(tmp_path / "other", config(tmp_path, checkpoint))


def test_heldout_gives_each_question_the_reward_of_a_run():
    """0 for what is wrong and for what never ended, whatever it says so far."""
    model = ModelConfig("qwen3", 1, 16, 1, 1, 16, vocab_size=32, intermediate_size=32, max_seq_len=32)
    asked = RunConfig("x", model, data=DataConfig(max_operand=9, heldout=3), sampler=SamplerConfig(max_new_tokens=9))
    tokenizer = CharTokenizer()
    said = [example.answer for example in load_task(asked, tokenizer).heldout]
    said[2] += "1"
    ends = ("stop", "length", "stop")

    def complete(prompts, most):
        assert len(prompts) == 3 and most == 9
        return [
            SimpleNamespace(tokens=[*tokenizer.encode(text), tokenizer.eos_id][: None if end == "stop" else -1],
                            finish_reason=end)
            for text, end in zip(said, ends, strict=True)
        ]  # fmt: skip

    outcome = TASKS["heldout"](SimpleNamespace(config=asked, tokenizer=tokenizer, complete=complete), quiet)
    assert outcome.value_N == (1.0, 0.0, 0.0) and outcome.metric == "reward"
    assert outcome.samples[0][1] == said[0] and "3 held-out questions of arithmetic" in outcome.about
    nothing = replace(asked, data=replace(asked.data, heldout=0))
    with pytest.raises(UserError, match="data.heldout is 0"):
        TASKS["heldout"](SimpleNamespace(config=nothing, tokenizer=tokenizer, complete=complete), quiet)
