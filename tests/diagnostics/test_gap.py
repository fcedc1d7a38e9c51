"""gap_summary against plain-Python definitions, at the extremes, and blind to what is off the mask."""

from __future__ import annotations

import math
from dataclasses import asdict

import pytest
import torch

from minite.diagnostics.gap import correlation, effective_sample_size, gap_metrics, gap_summary


def _batch(seed, tokens, scale=0.3):
    rng = torch.Generator().manual_seed(seed)
    old = -torch.rand(tokens, generator=rng, dtype=torch.float64) * 4
    gap = scale * torch.randn(tokens, generator=rng, dtype=torch.float64) ** 3
    advantage = torch.randn(tokens, generator=rng, dtype=torch.float64) + 0.5 * gap
    mask = torch.rand(tokens, generator=rng) < 0.8
    return old, old - gap, advantage, mask


@pytest.mark.parametrize("tokens", [2, 9, 120, 5000])
def test_every_field_by_its_definition(tokens):
    old, sampler, advantage, mask = _batch(tokens, tokens)
    mask[0] = True
    summary = gap_summary(old, sampler, advantage, mask)
    d = sorted((old - sampler)[mask].tolist())
    n = len(d)
    assert summary.tokens == n and summary.nonfinite == 0
    assert summary.abs_mean == pytest.approx(math.fsum(map(abs, d)) / n)
    assert summary.abs_max == max(map(abs, d))
    assert summary.abs_p99 == sorted(map(abs, d))[math.ceil(0.99 * len(d)) - 1]
    assert summary.mean == pytest.approx(math.fsum(d) / n)
    for name, share in (("p001", 0.001), ("p01", 0.01), ("p50", 0.5), ("p99", 0.99), ("p999", 0.999)):
        value = getattr(summary, name)
        below = sum(x <= value for x in d) / n
        less = sum(x < value for x in d) / n
        assert value in d and below >= share > less, name
    r = [math.exp(x) for x in d]
    assert summary.ess == pytest.approx(sum(r) ** 2 / (n * sum(x * x for x in r)))
    if n > 2:
        pair = torch.stack([(old - sampler)[mask], advantage[mask]])
        assert summary.corr_advantage == pytest.approx(float(torch.corrcoef(pair)[0, 1]))


def test_quantile_ranks_at_round_sizes():
    gap = torch.arange(1, 1001, dtype=torch.float64)
    summary = gap_summary(gap, 0 * gap, gap, gap > 0)
    assert (summary.p001, summary.p01, summary.p50, summary.p99, summary.p999) == (1, 10, 500, 990, 999)


def test_not_finite_gaps_are_counted_apart():
    old, sampler, advantage, mask = _batch(0, 200)
    clean = gap_summary(old, sampler, advantage, mask)
    inf, nan = float("inf"), float("nan")
    more = lambda value, extra: torch.cat([value, torch.tensor(extra, dtype=value.dtype)])  # noqa: E731
    summary = gap_summary(
        more(old, [nan, -inf, 0.0]),
        more(sampler, [0.0, -inf, -inf]),
        more(advantage, [1.0] * 3),
        more(mask, [True] * 3),
    )
    assert summary.nonfinite == 3 and summary.tokens == clean.tokens + 3
    assert {**asdict(summary), "nonfinite": 0, "tokens": clean.tokens} == asdict(clean)


def test_poison_off_the_mask_changes_nothing():
    old, sampler, advantage, mask = _batch(1, 300)
    poison = [torch.where(mask, value, torch.tensor(float("nan")).double()) for value in (old, sampler, advantage)]
    assert gap_summary(old, sampler, advantage, mask) == gap_summary(*poison, mask)


def test_order_of_tokens_changes_nothing():
    old, sampler, advantage, mask = _batch(2, 300)
    order = torch.randperm(300, generator=torch.Generator().manual_seed(0))
    assert gap_summary(old, sampler, advantage, mask) == gap_summary(
        *(v[order] for v in (old, sampler, advantage, mask))
    )


def test_strict_gaps_survive():
    """Gaps of 1e-9 between log-probs of size 10: float32 on the way would lose them."""
    sampler = torch.full((100,), -10.0, dtype=torch.float64)
    old = sampler + 1e-9 * torch.arange(100)
    summary = gap_summary(old, sampler, torch.arange(100.0), torch.ones(100, dtype=torch.bool))
    assert summary.abs_max == pytest.approx(9.9e-8, rel=1e-6)
    assert summary.corr_advantage == pytest.approx(1.0)
    assert summary.ess == pytest.approx(1.0)


def test_no_gap_at_all():
    old, _, advantage, mask = _batch(3, 50)
    summary = gap_summary(old, old.clone(), advantage, mask)
    assert summary.abs_max == 0 and summary.ess == 1.0 and summary.corr_advantage == 0.0


@pytest.mark.parametrize("nonfinite", [False, True])
def test_batches_without_a_finite_gap(nonfinite):
    old, sampler, advantage, mask = _batch(4, 20)
    mask[:] = nonfinite
    old = old * float("nan") if nonfinite else old
    summary = gap_summary(old, sampler, advantage, mask)
    assert summary.tokens == summary.nonfinite == (20 if nonfinite else 0)
    assert not any(value for key, value in asdict(summary).items() if key not in ("tokens", "nonfinite"))


def test_one_token():
    one = torch.tensor([-1.0], dtype=torch.float64)
    summary = gap_summary(one, one - 0.5, one, torch.ones(1, dtype=torch.bool))
    assert summary.p001 == summary.p50 == summary.p999 == summary.mean == 0.5
    assert summary.ess == pytest.approx(1.0) and summary.corr_advantage == 0.0


def test_effective_sample_size_without_overflow():
    spread = torch.tensor([1e4, -1e4, 0.0], dtype=torch.float64)
    assert effective_sample_size(spread) == pytest.approx(1 / 3)  # one token has all the weight
    assert effective_sample_size(torch.full((7,), 800.0, dtype=torch.float64)) == pytest.approx(1.0)


def test_correlation_far_apart_in_size():
    a = torch.linspace(-1, 1, 50, dtype=torch.float64)
    assert correlation(1e-200 * a, -1e200 * a) == pytest.approx(-1.0)


def test_metrics_hold_every_number_of_the_summary():
    summary = gap_summary(*_batch(5, 400))
    fields = asdict(summary)
    fields.pop("tokens")
    assert sorted(gap_metrics(summary).values()) == sorted(map(float, fields.values()))
