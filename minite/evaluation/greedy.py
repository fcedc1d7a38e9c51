"""A few greedy answers, to be read; the value shows a model that repeats itself."""

from __future__ import annotations

from minite.evaluation.outcome import Outcome, Tell
from minite.evaluation.subject import Subject

PROMPTS = (
    "What is the capital of France?",
    "Explain in two sentences why the sky is blue.",
    "Write a short story about a robot who learns to paint.",
    "List three things to take on a hike.",
)
MAX_NEW_TOKENS = 96
N = 4  # tokens of an n-gram


def greedy(subject: Subject, tell: Tell) -> Outcome:
    """Share of distinct 4-grams in each greedy answer: 1 without repetition, near 0 in a loop."""
    tell(f"greedy: {len(PROMPTS)} prompts, up to {MAX_NEW_TOKENS} tokens each")
    answers = subject.greedy(PROMPTS, MAX_NEW_TOKENS)
    samples = tuple((p, subject.tokenizer.decode(answer)) for p, answer in zip(PROMPTS, answers, strict=True))
    values = tuple(distinct_share(answer) for answer in answers)
    return Outcome("distinct 4-grams", values, f"{len(PROMPTS)} prompts, at most {MAX_NEW_TOKENS} tokens", samples)


def distinct_share(tokens: list[int]) -> float:
    """1 for an answer of fewer than N tokens, which cannot repeat an n-gram."""
    grams = [tuple(tokens[i : i + N]) for i in range(len(tokens) - N + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0
