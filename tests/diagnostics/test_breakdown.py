"""The gap taken apart, against plain loops over the tokens; and the page made of it."""

from __future__ import annotations

import json
import math
import random

import pytest
import torch

from minite.diagnostics.breakdown import ENTROPIES, POSITIONS, PROBABILITIES, breakdown
from minite.diagnostics.causes import Cause, causes_table
from minite.diagnostics.gap_findings import Findings
from minite.diagnostics.gap_page import render, write_page
from minite.diagnostics.layerwise import Finding, LayerReport
from minite.errors import UserError
from minite.types import RolloutBatch


def batch_of(seed: int, lengths: list[tuple[int, int]]) -> tuple[RolloutBatch, torch.Tensor]:
    """(prompt, response) lengths; values off the mask are poison."""
    rng = torch.Generator().manual_seed(seed)
    mask = torch.tensor([on for p, r in lengths for on in [False] * p + [True] * r], dtype=torch.bool)
    tokens, sequences = len(mask), len(lengths)
    old = -(torch.rand(tokens, generator=rng, dtype=torch.float64) ** 2) * 8
    sampler = old - 0.2 * torch.randn(tokens, generator=rng, dtype=torch.float64) ** 3
    entropy = torch.rand(tokens, generator=rng) ** 2 * 4
    for x in (old, sampler, entropy):
        x[~mask] = float("nan")
    offsets = torch.tensor([0, *(p + r for p, r in lengths)]).cumsum(0)
    batch = RolloutBatch(
        torch.zeros(tokens, dtype=torch.int64), offsets, mask, sampler, torch.zeros(sequences), torch.zeros(sequences),
        torch.zeros(sequences), torch.zeros(sequences, dtype=torch.int64), "digest", old_logprob_T=old,
    )  # fmt: skip
    return batch, entropy


def by_hand(batch: RolloutBatch, entropy: torch.Tensor) -> list[dict[str, float]]:
    tokens = []
    offsets = batch.cu_seqlens_S1.tolist()
    for s, (start, end) in enumerate(zip(offsets, offsets[1:], strict=False)):
        position = 0
        for t in range(start, end):
            if batch.loss_mask_T[t]:
                gap = float(batch.old_logprob_T[t] - batch.sampler_logprob_T[t])
                probability = math.exp(float(batch.sampler_logprob_T[t]))
                values = {"position": position, "probability": probability, "entropy": float(entropy[t]), "response": s}
                tokens.append({"gap": gap, **values})
                position += 1
    return [token for token in tokens if math.isfinite(token["gap"])]


@pytest.mark.parametrize("seed", range(4))
def test_parts_against_a_loop(seed: int) -> None:
    draw = random.Random(seed)
    batch, entropy = batch_of(seed, [(draw.randint(0, 5), draw.randint(0, 40)) for _ in range(12)])
    batch.old_logprob_T[batch.loss_mask_T.nonzero()[3]] = float("-inf")  # type: ignore[index]
    found, tokens = breakdown(batch, entropy), by_hand(batch, entropy)
    gaps = sorted(t["gap"] for t in tokens)
    assert found.summary.tokens == len(tokens) + 1 and found.summary.nonfinite == 1
    assert found.k1 == pytest.approx(-math.fsum(gaps) / len(gaps))
    assert found.k3 == pytest.approx(math.fsum(math.exp(d) - 1 - d for d in gaps) / len(gaps))
    lowest = gaps[: math.ceil(len(gaps) / 100)]
    assert found.tail_mean == pytest.approx(math.fsum(lowest) / len(lowest))
    edges = {"position": POSITIONS, "probability": PROBABILITIES, "entropy": ENTROPIES, "response": range(99)}
    for part, starts in edges.items():
        bins: dict[float, list[float]] = {}
        for token in tokens:
            bins.setdefault(max(e for e in starts if e <= token[part]), []).append(token["gap"])
        assert [b.start for b in found.parts[part]] == sorted(bins)
        for b in found.parts[part]:
            inside = bins[b.start]
            assert (b.tokens, b.lowest, b.abs_max) == (len(inside), min(inside), max(map(abs, inside)))
            assert b.abs_mean == pytest.approx(math.fsum(map(abs, inside)) / len(inside))
            assert b.mean == pytest.approx(math.fsum(inside) / len(inside), abs=1e-12)


def test_nothing_finite_and_nothing_at_all() -> None:
    batch, entropy = batch_of(0, [(2, 3)])
    batch.old_logprob_T[:] = float("nan")  # type: ignore[index]
    found = breakdown(batch, entropy)
    assert (found.summary.nonfinite, found.k1, found.k3, found.tail_mean) == (3, 0.0, 0.0, 0.0)
    assert not any(found.parts.values())


def findings() -> Findings:
    batch, entropy = batch_of(1, [(2, 9), (1, 30), (4, 3)])
    gap = breakdown(batch, entropy)
    parted = Finding("model.layers.0.<b>", 9, 8, 7, 0.5, ("weight codes (expert 3: 4 of 64 values)",))
    layers = LayerReport(3, 49, (parted,), parted.module, f"{parted.differs[0]} (7 of 8 tokens)")
    return Findings("tiny", "d" * 64, "off", gap, layers, (Cause("as it is", "", gap.summary),))


def test_text_and_json_hold_what_was_found() -> None:
    found = findings()
    text = found.text()
    assert f"mean |gap|            {found.gap.summary.abs_mean:.3e}" in text
    assert "first operation that parts the engines: model.layers.0.<b>" in text
    assert "weight codes (expert 3" in text
    data = json.loads(json.dumps(found.to_json()))
    assert data["gap"]["k3"] == found.gap.k3
    assert [b["tokens"] for b in data["gap"]["parts"]["response"]] == [9, 30, 3]
    assert data["layers"]["findings"][0]["parted"] == 7


def test_the_page_stands_alone_and_escapes(tmp_path) -> None:
    path = write_page(tmp_path / "gap.html", findings())
    text = path.read_text()
    assert text == render(findings())
    assert "model.layers.0.&lt;b&gt;" in text and "<b>," not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert "[nats] by position" in text
    with pytest.raises(UserError, match="--html: .*cannot be written"):
        write_page(tmp_path / "no" / "gap.html", findings())


def test_causes_are_multiples_of_the_first() -> None:
    batch, entropy = batch_of(2, [(1, 50)])
    base = breakdown(batch, entropy).summary
    batch.old_logprob_T = batch.sampler_logprob_T + 2 * (batch.old_logprob_T - batch.sampler_logprob_T)
    twice = breakdown(batch, entropy).summary
    lines = causes_table([Cause("as it is", "", base), Cause("weights", "bf16", twice)]).splitlines()
    assert lines[1].split()[5] == "1" and lines[2].split()[4] == "2"
