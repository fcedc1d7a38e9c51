"""The pretrained model: what only real weights can show. scripts/smollm2 makes its directory, as CI does."""

from __future__ import annotations

from pathlib import Path

import pytest

from minite.config import load_recipe
from minite.driver.tokenizer import make_tokenizer
from minite.evaluation import text
from minite.evaluation.evaluate import evaluate
from minite.evaluation.subject import load

ROOT = Path(__file__).parents[2]
DIRECTORY = ROOT / "models" / "SmolLM2-135M-Instruct"
# Two windows, with the texts of Python 3.11 and 3.12: BF16 15.2; W4A4 0.31 and 0.33 nats more. A wrong scale, a
# lost norm or no quantization at all is outside: W4A16 costs 0.21, 2D weights 0.50.
PERPLEXITY = (12.0, 19.0)
W4A4_COST = (0.25, 0.42)  # [nats/token]
needs_model = pytest.mark.skipif(not DIRECTORY.is_dir(), reason="no models/SmolLM2-135M-Instruct; run scripts/smollm2")


def recipe(precision: str, *settings: str):
    settings = (f"data.tokenizer={DIRECTORY}", "sampler.device=cpu", "sampler.kv_tokens=2048", *settings)
    return load_recipe(ROOT / "recipes" / f"smollm2_135m_{precision}_grpo.yaml", settings)


@needs_model
def test_chat_template_and_digits():
    tokenizer = make_tokenizer(recipe("bf16"))
    system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
    chat = f"{system}<|im_start|>user\nHi  2024<|im_end|>\n<|im_start|>assistant\n"
    tokens = tokenizer.encode_prompt("Hi  2024")
    assert tokens == tokenizer.encode(chat)
    assert tokens.count(1) == 3 and tokens.count(2) == 2 and tokenizer.eos_id == 2  # <|im_start|>, <|im_end|>
    double_blank, *digits = tokenizer.encode("Hi  2024")[1:]
    assert tokenizer.decode([double_blank]) == "  " and [tokenizer.decode([d]) for d in digits] == list("2024")


@needs_model
@pytest.mark.slow
def test_quantization_costs_little_and_answers_stay(monkeypatch):
    """TREND: perplexity of two windows and the answer to a question, in BF16 and in W4A4."""
    monkeypatch.setattr(text, "WINDOWS", 2)
    exact, w4a4 = (r.figures() for r in evaluate(DIRECTORY, [recipe("bf16"), recipe("w4a4")], ["text"], print))
    assert PERPLEXITY[0] < exact["perplexity"] < PERPLEXITY[1]
    assert W4A4_COST[0] < w4a4["difference"] < W4A4_COST[1]
    subject = load(DIRECTORY, recipe("bf16"))
    answer = subject.greedy(["What is the capital of France?"], 12)[0]
    assert subject.tokenizer.decode(answer) == "The capital of France is Paris."
