"""The recipe's own held-out questions, answered greedily and scored as a run would reward them."""

from __future__ import annotations

from contextlib import closing

from minite.driver.data import load_task
from minite.driver.reward import BadReward, Scorer
from minite.errors import UserError
from minite.evaluation.outcome import Outcome, Tell
from minite.evaluation.subject import Subject

SAMPLES = 2  # answers to be read


def heldout(subject: Subject, tell: Tell) -> Outcome:
    """Reward of each answer; one that did not end within ``sampler.max_new_tokens`` has 0. Raises UserError."""
    data, most = subject.config.data, subject.config.sampler.max_new_tokens
    examples = load_task(subject.config, subject.tokenizer).heldout
    if not examples:
        raise UserError("--tasks heldout: data.heldout is 0, so nothing is held out; raise it with -o data.heldout=N")
    tell(f"heldout: {len(examples)} questions, up to {most} tokens each")
    answers = subject.complete([example.prompt for example in examples], most)
    texts = [subject.tokenizer.decode(answer.tokens) for answer in answers]
    try:
        with closing(Scorer(data)) as score:
            values = tuple(
                score(example, text) if answer.finish_reason == "stop" else 0.0
                for example, answer, text in zip(examples, answers, texts, strict=True)
            )
    except BadReward as error:
        raise UserError(f"data.reward: {data.reward} failed: {error}") from None
    what = ", ".join(data.tasks) if data.tasks else data.kind
    about = f"{len(examples)} held-out questions of {what}, greedy, at most {most} tokens"
    return Outcome(
        "reward", values, about, tuple((e.prompt, t) for e, t in zip(examples, texts, strict=True))[:SAMPLES]
    )
