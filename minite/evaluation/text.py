"""Language modelling of a text that every Python carries: chapters of its own language reference."""

from __future__ import annotations

import hashlib
import platform

from minite.errors import UserError
from minite.evaluation.outcome import Outcome, Tell
from minite.evaluation.subject import Subject

TOPICS = ("types", "specialnames", "compound")  # the data model and the compound statements: the longest prose
WINDOW = 512  # tokens scored together; the first of them has no context and no score
WINDOWS = 40


def text(subject: Subject, tell: Tell) -> Outcome:
    """``score`` over as many windows as results are published for."""
    return score(subject, tell, WINDOWS)


def score(subject: Subject, tell: Tell, most: int) -> Outcome:
    """Nats per token over the first ``most`` windows of the text, end to end, each without context from before it."""
    prose = source()
    tokens = subject.tokenizer.encode(prose)
    size = min(WINDOW, subject.config.model.max_seq_len)
    windows = [tokens[i : i + size] for i in range(0, len(tokens) - size + 1, size)][:most]
    values = []
    for scores in subject.logprobs(windows):
        values.append(-sum(scores) / len(scores))
        if len(values) % 8 == 0:
            tell(f"text: {len(values)} of {len(windows)} windows")
    digest = hashlib.sha256(prose.encode()).hexdigest()[:12]
    about = (
        f"Python {platform.python_version()} language reference ({', '.join(TOPICS)}; sha256 {digest}), "
        f"{len(windows)} windows of {size} tokens"
    )
    return Outcome("nats/token", tuple(values), about)


def source() -> str:
    """The text. Raises UserError where Python was installed without its help topics."""
    try:
        from pydoc_data.topics import topics
    except ModuleNotFoundError:
        raise UserError("task text: this Python has no pydoc_data.topics; install the full standard library") from None
    return "\n\n".join(topics[name] for name in TOPICS)
