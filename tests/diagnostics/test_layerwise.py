"""The comparison of two traces, on traces made by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from minite.diagnostics.layerwise import Observed, compare, layer_table
from minite.errors import UserError

OFFSETS = torch.tensor([0, 3, 3, 7])  # three sequences, one of them empty
TOKENS = 7


def chain(seed: int = 0) -> list[Observed]:
    """a -> attention -> b, each output the next input."""
    rng = torch.Generator().manual_seed(seed)
    u, v, w, y = (torch.randn(TOKENS, 4, generator=rng) for _ in range(4))
    seen, weight = torch.ones(TOKENS, dtype=torch.bool), torch.arange(24).view(2, 12)
    return [
        Observed("a", "norm", seen, {"x": u}, {"scale": u[:, 0].clone()}, {"y": v}, {"eps": 1.0}),
        Observed("attention", "attention", seen, {"q": v, "k": v.clone()}, {}, {"y": w}, context=("k",)),
        Observed("b", "GEMM", seen, {"x": w}, {}, {"y": y}, {"weight": weight}),
    ]


def parted(findings: object) -> list[tuple[str, int, int]]:
    return [(f.module, f.equal_inputs, f.parted) for f in findings]  # type: ignore[attr-defined]


def test_equal_traces_nan_included() -> None:
    ours, theirs = chain(), chain()
    for trace in (ours, theirs):
        trace[0].outputs["y"][2] = float("nan")
        trace[1].inputs["q"][2] = float("nan")
    report = compare(ours, theirs, OFFSETS)
    assert report.first is None and parted(report.findings) == [("a", 7, 0), ("attention", 7, 0), ("b", 7, 0)]
    assert "no operation parts the engines" in layer_table(report)


def test_the_first_of_two_and_how_far() -> None:
    ours, theirs = chain(), chain()
    for i, token in ((0, 4), (2, 1)):
        theirs[i].outputs["y"] = theirs[i].outputs["y"].clone()
        theirs[i].outputs["y"][token, 2] += 0.5
    theirs[1].inputs["q"] = theirs[0].outputs["y"]  # what follows sees it
    report = compare(ours, theirs, OFFSETS)
    assert report.first == "a" and report.cause.startswith("norm (1 of 7 tokens with equal inputs")
    assert report.findings[0].max_difference == pytest.approx(0.5)
    assert parted(report.findings) == [("a", 7, 1), ("attention", 6, 0), ("b", 7, 1)]


def test_internals_are_blamed_where_tokens_part_only() -> None:
    ours, theirs = chain(), chain()
    theirs[0].internals["scale"][5] += 1  # a difference that no output shows
    assert compare(ours, theirs, OFFSETS).first is None
    theirs[0].outputs["y"][5] += 1
    theirs[1].inputs["q"] = theirs[0].outputs["y"]
    assert compare(ours, theirs, OFFSETS).findings[0].differs == ("scale",)


@pytest.mark.parametrize(("token", "equal"), [(0, 4), (2, 6), (3, 3), (6, 6)])
def test_a_key_reaches_all_later_tokens_of_its_sequence(token: int, equal: int) -> None:
    """Outputs behind it differ and are no fault of attention."""
    ours, theirs = chain(), chain()
    theirs[1].inputs["k"][token] += 1
    end = next(int(end) for end in OFFSETS if end > token)
    theirs[1].outputs["y"] = theirs[1].outputs["y"].clone()
    theirs[1].outputs["y"][token:end] += 1
    finding = compare(ours, theirs, OFFSETS).findings[1]
    assert (finding.equal_inputs, finding.parted) == (equal, 0)


def test_tokens_that_only_one_side_saw_do_not_count() -> None:
    ours, theirs = chain(), chain()
    theirs[2].seen_T = torch.arange(TOKENS) < 5
    theirs[2].outputs["y"][5:] = float("inf")
    report = compare(ours, theirs, OFFSETS)
    assert report.first is None and report.findings[2].tokens == 5


def test_between_two_operations() -> None:
    ours, theirs = chain(), chain()
    theirs[2].inputs["x"] = theirs[2].inputs["x"].clone()
    theirs[2].inputs["x"][3] += 1
    report = compare(ours, theirs, OFFSETS)
    assert report.first == "b" and "residual addition or embedding" in report.cause


@pytest.mark.parametrize(
    ("theirs_now", "text"),
    [
        (
            {"weight": torch.arange(24).view(2, 12).index_fill(0, torch.tensor(1), 99)},
            "weight (expert 1: 12 of 24 rows",
        ),
        ({"weight": torch.zeros(2, 8)}, "weight: shape [2, 12] in the learner, [2, 8] in the sampler"),
        ({"weight codes": torch.zeros(2, 12)}, "weight: in the learner only"),
    ],
    ids=["expert", "shape", "format"],
)
def test_parameters(theirs_now: dict[str, Tensor], text: str) -> None:
    ours, theirs = chain(), chain()
    theirs[2].parameters = {**theirs_now}
    report = compare(ours, theirs, OFFSETS)
    assert report.first == "b" and report.findings[2].differs[0].startswith(text)
    assert report.cause.endswith("(no token of these shows it)")


def test_traces_of_two_models_are_refused() -> None:
    with pytest.raises(UserError, match="different operations"):
        compare(chain(), chain()[:2], OFFSETS)
