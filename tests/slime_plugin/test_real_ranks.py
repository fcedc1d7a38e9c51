"""Tensor and expert parallelism inside slime: the same codes, and log-probs but for the order of sums."""

from __future__ import annotations

import pytest
import torch
from checkout import in_slime

from minite.sync.verify import compare

pytestmark = pytest.mark.slow


def run(directory, tensor_parallel, expert_parallel, ranks):
    out = directory / f"tp{tensor_parallel}ep{expert_parallel}"
    words = [str(tensor_parallel), str(expert_parallel), str(directory / "hf"), str(out)]
    in_slime("real_ranks.py", *words, ranks=ranks)
    return [torch.load(f"{out}.{rank}") for rank in range(ranks)]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    directory = tmp_path_factory.mktemp("ranks")
    return directory, run(directory, 1, 1, 1)[0]


@pytest.mark.parametrize(("tensor_parallel", "expert_parallel"), [(2, 1), (1, 2), (2, 2)])
def test_a_cut_model_sends_the_same_bytes_and_gives_the_same_log_probs(alone, tensor_parallel, expert_parallel):
    directory, whole = alone
    ranks = run(directory, tensor_parallel, expert_parallel, 2)
    union = {}
    for rank in ranks:
        union |= rank["sent"]
        gap = (rank["log_probs"] - whole["log_probs"]).abs()
        # The bounds of the embedded learner under the same cuts (minite/learner/README.md), BF16.
        assert gap.max() < 0.02 and gap.mean() < 1e-3, gap
    assert compare(union, whole["sent"]) is None, compare(union, whole["sent"])
    if expert_parallel == 2:  # each has its own half of the experts
        halves = [{name for name in rank["sent"] if ".experts." in name} for rank in ranks]
        assert halves[0] and halves[1] and not halves[0] & halves[1]
