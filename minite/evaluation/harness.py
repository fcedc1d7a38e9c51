"""Tasks of lm-evaluation-harness through that library: it makes the prompts and judges, the subject answers."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from minite.errors import UserError
from minite.evaluation.outcome import Outcome, Tell
from minite.evaluation.subject import Subject

PREFIX = "lm-eval:"  # before the name of a task or a tag of the library, or the path of a task's YAML file
MAX_NEW_TOKENS = 256  # where the task sets none: the library's own default


def harness_task(name: str, limit: int | None) -> Callable[[Subject, Tell], Outcome]:
    """The task ``lm-eval:NAME``, its data read, cut to the first ``limit`` items of each part; for every subject alike.

    Raises UserError without the library, for a name that it does not have, and for data that cannot be had.
    """
    try:
        from lm_eval.tasks import TaskManager
    except ModuleNotFoundError as error:
        raise UserError(f"--tasks: {name} needs {error.name}; run pip install 'minite[lm-eval]'") from None
    asked = name.removeprefix(PREFIX)
    manager = TaskManager(include_defaults=not Path(asked).is_file())  # which reads 14 000 files
    try:
        parts = list(manager.load([asked])["tasks"].values())
    except KeyError:
        close = difflib.get_close_matches(asked, manager.all_tasks, n=1)
        hint = f"nearest is '{close[0]}'" if close else "'lm-eval ls tasks' lists them"
        raise UserError(f"--tasks: {name}: lm-eval has no such task, and there is no such file; {hint}") from None
    except (OSError, ValueError) as error:  # datasets raises one of these when offline, gated, renamed or malformed
        first = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(f"--tasks: {name}: its data cannot be had: {first}; download them, or give a file") from None
    return functools.partial(_ask, name, manager, parts, limit)


def _ask(name: str, manager: Any, parts: list[Any], limit: int | None, subject: Subject, tell: Tell) -> Outcome:
    """One value per item: that of the first metric of the task's first filter."""
    import lm_eval

    tell(f"{name}: {len(parts)} part(s)")
    cut: list[int] = []
    found = lm_eval.simple_evaluate(
        _adapter(subject, name, cut), tasks=parts, task_manager=manager, limit=limit, bootstrap_iters=0
    )
    metric, values = first_metric(name, found["samples"])
    shots = ", ".join(sorted({str(count) for count in found["n-shot"].values()}))
    about = f"lm-eval {lm_eval.__version__}, {len(values)} items, {shots} examples in each prompt"
    if cut:
        about += f"; {len(cut)} requests were longer than the model's {subject.room} tokens and lost their beginning"
    return Outcome(metric, values, about)


def first_metric(name: str, samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> tuple[str, tuple[float, ...]]:
    """The first metric of the first item, and its value for every item of every part."""
    items = [item for part in samples.values() for item in part if item["filter"] == part[0]["filter"]]
    metric = items[0]["metrics"][0]
    for item in items:
        if not isinstance(item.get(metric), int | float):
            raise UserError(
                f"--tasks: {name}: got {item.get(metric)!r} as {metric} of an item, expected a number for each item, "
                "which can be paired; choose another task (a text's perplexity: task text)"
            )
    return metric, tuple(float(item[metric]) for item in items)


def _adapter(subject: Subject, name: str, cut: list[int]) -> Any:
    """The subject as the library's model. Adds the excess of each request that did not fit to ``cut``. [tokens]"""
    from lm_eval.api.model import TemplateLM

    class Adapter(TemplateLM):
        eot_token_id = subject.tokenizer.eos_id

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return subject.tokenizer.encode(string)

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            return loglikelihoods(subject, [(context, answer) for _, context, answer in requests], cut)

        def generate_until(self, requests: Any, **_: Any) -> list[str]:
            return answers(subject, name, [request.args for request in requests], cut)

        def loglikelihood_rolling(self, requests: Any, **_: Any) -> list[float]:
            raise UserError(f"--tasks: {name} measures whole texts, not items; use task text")

    return Adapter()


def loglikelihoods(
    subject: Subject, requests: Sequence[tuple[list[int], list[int]]], cut: list[int]
) -> list[tuple[float, bool]]:
    """Of each answer after its context [nats], and whether every token of it is the likeliest."""
    sequences = [fitting(context + answer, subject.room, cut) for context, answer in requests]
    found = []
    for (_, answer), (logprob_T, likeliest_T) in zip(requests, subject.engine.scores(sequences), strict=True):
        start = max(len(logprob_T) - len(answer), 0)
        found.append((float(logprob_T[start:].sum()), bool(likeliest_T[start:].all())))
    return found


def answers(
    subject: Subject, name: str, requests: Sequence[tuple[str, Mapping[str, Any]]], cut: list[int]
) -> list[str]:
    """The greedy answer to each context up to the first stop text. Raises UserError for a task that samples."""
    found: dict[int, str] = {}
    by_length: dict[int, list[int]] = {}
    for i, (_, how) in enumerate(requests):
        if how.get("do_sample"):
            raise UserError(f"--tasks: {name} draws its answers at random; expected a task with greedy answers")
        by_length.setdefault(how.get("max_gen_toks", MAX_NEW_TOKENS), []).append(i)
    for length, indices in by_length.items():
        room = min(subject.room, subject.config.sampler.kv_tokens) - length
        if room < 1:
            raise UserError(
                f"--tasks: {name} asks for {length} new tokens, model.max_seq_len is {subject.room} and "
                f"sampler.kv_tokens {subject.config.sampler.kv_tokens}: no room for a prompt; choose another task"
            )
        contexts = [fitting(subject.tokenizer.encode(requests[i][0]), room, cut) for i in indices]
        for i, done in zip(indices, subject.continuations(contexts, length), strict=True):
            found[i] = until(subject.tokenizer.decode(done.tokens), requests[i][1].get("until") or ())
    return [found[i] for i in range(len(requests))]


def fitting(tokens: list[int], room: int, cut: list[int]) -> list[int]:
    """The last ``room`` tokens, as the library's own models do it: an answer stands at the end."""
    if len(tokens) > room:
        cut.append(len(tokens) - room)
    return tokens[-room:]


def until(text: str, stops: str | Sequence[str]) -> str:
    """The text before the first of the stop texts."""
    for stop in [stops] if isinstance(stops, str) else stops:
        text = text.split(stop)[0] if stop else text
    return text
