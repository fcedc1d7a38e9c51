"""Questions and scores of reasoning_gym, a package of some hundred generators: data.kind reasoning_gym."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from minite.config.build import nearest
from minite.config.schema import DataConfig
from minite.errors import UserError

SEED = 0  # of the questions: as with the other kinds, a run's seed decides the split and the order, not what is asked

# Their scorers hand the answer to Python's eval: what a model says must not run beside a run's files and keys.
RUNS_ANSWERS = frozenset({"binary_matrix", "spiral_matrix", "string_insertion"})

Entry = Mapping[str, Any]  # of reasoning_gym: question, answer and what its scorer reads


def questions(data: DataConfig) -> list[Entry]:
    """``data.questions`` of each of ``data.tasks``, each once. Raises UserError for what does not exist."""
    if find_spec("reasoning_gym") is None:
        raise UserError(
            "data.kind is reasoning_gym, but the package is not installed: pip install 'minite[reasoning]', "
            "or take another kind"
        )
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    found: dict[str, Entry] = {}
    for name, settings in data.tasks.items():
        if name not in DATASETS:
            raise UserError(f"data.tasks: reasoning_gym has no {name!r}; {nearest(name, sorted(DATASETS))}")
        if name in RUNS_ANSWERS:
            raise UserError(f"data.tasks: the scorer of {name} runs a model's answer as Python code; take another task")
        try:
            made = reasoning_gym.create_dataset(name, seed=SEED, size=data.questions, **settings)
            for entry in made:
                if entry["answer"] is not None:  # a few tasks have questions without an answer to imitate
                    found.setdefault(entry["question"], entry)
        except (TypeError, ValueError, AssertionError) as error:
            raise UserError(
                f"data.tasks.{name}: {error}; its settings are those of the task in reasoning_gym"
            ) from None
    return list(found.values())


def score(entry: Entry, response: str) -> float:
    """0 to 1, by the task's own scorer, of what stands in the last <answer> of a response, or of all of it."""
    from reasoning_gym.utils import extract_answer

    answer = extract_answer(response) or response.strip()
    try:
        return float(_scorer(entry["metadata"]["source_dataset"])(answer, entry))
    except Exception:  # some scorers raise, and anything, for an answer that they cannot parse: it is a wrong one
        return 0.0


@functools.cache
def _scorer(name: str) -> Callable[[str, Entry], float]:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)
