"""Questions and scores of reasoning_gym, a package of some hundred generators: data.kind reasoning_gym."""

from __future__ import annotations

import base64
import functools
import pickle
import re
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

from minite.config.build import nearest
from minite.config.schema import DataConfig
from minite.errors import UserError

SEED = 0  # of the questions: as with the other kinds, a run's seed decides the split and the order, not what is asked

# Their scorers hand the answer to Python's eval: what a model says must not run beside a run's files and keys.
RUNS_ANSWERS = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})

# Theirs hand it to sympy's parse_expr, which is eval with more names: only what is a formula and no more gets there.
PARSES_ANSWERS = frozenset(
    {"countdown", "puzzle24", "polynomial_multiplication", "simple_integration", "intermediate_integration"}
)
_FUNCTIONS = "asin|acos|atan|sinh|cosh|tanh|sin|cos|tan|exp|log|ln|sqrt|pi|Abs|Integral"
_FORMULA = re.compile(rf"(?:\b(?:{_FUNCTIONS}|[A-Za-z])\b|\d+\.?\d*|\.\d+|[-+*/^(),\s])*")

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
    """0 to 1, by the task's own scorer, of what stands in the last <answer> of a response, or of all of it.

    Some scorers compute what an answer says and never end for 9**9**9**9: in a run, `reward.Scorer` calls this in a
    process of its own (reasoning_served.py).
    """
    from reasoning_gym.utils import extract_answer

    answer, name = extract_answer(response) or response.strip(), entry["metadata"]["source_dataset"]
    if name in PARSES_ANSWERS and not _FORMULA.fullmatch(answer):
        return 0.0
    try:
        return float(_scorer(name)(answer, entry))
    except Exception:  # some scorers raise, and anything, for an answer that they cannot parse: it is a wrong one
        return 0.0


def packed(entry: Entry) -> str:
    """An entry as text. Pickled, because JSON would turn its tuples into lists and keys that are numbers into text."""
    return base64.b64encode(pickle.dumps(entry)).decode()


def unpacked(text: str) -> Entry:
    """Inverse of `packed`. Only for texts that this run made: unpickling runs what it reads."""
    entry: Entry = pickle.loads(base64.b64decode(text))
    return entry


@functools.cache
def _scorer(name: str) -> Callable[[str, Entry], float]:
    from reasoning_gym import get_score_answer_fn

    return get_score_answer_fn(name)
