"""TRIAGE: the rule against a scalar copy of it, and what it promises whatever the batch looks like."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from loss_batches import EXTREME_ADVANTAGES, EXTREME_GAPS, batch_of, extreme_batch, random_batch
from triage_scalar import triage_response

from minite.config.schema import CorrectionConfig
from minite.losses.correction import correct
from minite.losses.tokens import loss_tokens
from minite.losses.triage import Region, push_on_gap, region_weights, risky_windows, token_regions, triage
from minite.losses.triage_state import TriageState

DEFAULT = CorrectionConfig()
SMALL = replace(DEFAULT, window=4)
VARIANTS = {
    "default": DEFAULT,
    "small windows": SMALL,
    "truncate": replace(SMALL, narrowing="truncate"),
    "steep": replace(SMALL, power=2.5, segment_risk=0.15, response_tail_frac=0.05),
    "tight": replace(SMALL, calm=0.05, limit_negative=0.3, limit_positive=0.6, window=1),
    "no calm": replace(SMALL, calm=0.0, response_tail_frac=1.0),
}


def _scalar_weights(config, batch):
    """Weights of the loss tokens by the scalar copy, response by response."""
    weights, regions = [], []
    for s in batch.sequence[batch.mask].unique_consecutive():
        chosen = batch.mask & (batch.sequence == s)
        gaps = (batch.old - batch.sampler)[chosen].tolist()
        for region, weight in triage_response(config, gaps, batch.advantage[chosen].tolist()):
            regions.append(region)
            weights.append(weight)
    return regions, torch.tensor(weights, dtype=torch.float64)


def _regions_seen(metrics):
    return {r.name.lower(): metrics[f"triage/{r.name.lower()}_frac"] for r in Region}


def _assert_as_scalar(config, batch):
    tokens = loss_tokens(*batch.args())
    weight_N, metrics = triage(config, tokens, None)
    regions, expected_N = _scalar_weights(config, batch)
    # Both compute in doubles, but the power is rounded by two libraries: a few units in the last place.
    torch.testing.assert_close(weight_N, expected_N, rtol=1e-14, atol=0)
    for name, frac in _regions_seen(metrics).items():
        assert frac == regions.count(name) / max(len(regions), 1), name


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("seed", range(4))
def test_equals_the_scalar_rule_on_random_batches(name, seed):
    batch = random_batch(seed, scale=(0.05, 0.3, 0.5, 2.0)[seed])
    _assert_as_scalar(VARIANTS[name], batch)


def test_random_batches_reach_every_region_and_both_escalations():
    """Without this the comparison above could pass on batches that are clear throughout."""
    seen, window, response = set(), 0.0, 0.0
    for seed in range(4):
        batch = random_batch(seed, scale=0.3)
        batch.sampler[batch.mask.nonzero()[3]] = float("nan")
        for config in VARIANTS.values():
            metrics = triage(config, loss_tokens(*batch.args()), None)[1]
            seen |= {name for name, frac in _regions_seen(metrics).items() if frac > 0}
            window += metrics["triage/window_frac"]
            response += metrics["triage/response_frac"]
    assert seen == {"clear", "narrowing", "widening", "tail", "broken"}
    assert window > 0 and response > 0


gaps_of_response = st.lists(st.one_of(st.floats(-1.5, 1.5), st.sampled_from(EXTREME_GAPS)), min_size=0, max_size=12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(gaps_of_response, st.sampled_from(EXTREME_ADVANTAGES)), max_size=4),
    st.sampled_from(sorted(VARIANTS)),
)
def test_equals_the_scalar_rule_on_any_batch(responses, name):
    _assert_as_scalar(VARIANTS[name], batch_of([gaps for gaps, _ in responses], [a for _, a in responses]))


@pytest.mark.parametrize(
    ("gap", "advantage", "region", "weight"),
    [
        (0.1, 1.0, "clear", 1.0),  # the edge belongs to clear
        (-0.1, -1.0, "clear", 1.0),
        (0.2, 1.0, "widening", 0.5),  # calm / |d|
        (0.2, -1.0, "narrowing", 1.0),
        (-0.2, -1.0, "widening", 0.5),
        (-0.2, 1.0, "narrowing", 1.0),
        (-0.5, -1.0, "widening", 0.2),  # the edge belongs to widening
        (-0.51, -1.0, "tail", 0.0),
        (0.51, 1.0, "widening", 0.1 / 0.51),  # the positive side has the wider limit
        (1.01, 1.0, "tail", 0.0),
        (-9.0, 1.0, "narrowing", 1.0),  # however large: the update closes it
        (9.0, 0.0, "clear", 1.0),  # no push
        (float("nan"), 1.0, "broken", 0.0),
        (float("inf"), -1.0, "broken", 0.0),
    ],
)
def test_regions_of_a_token(gap, advantage, region, weight):
    # Nine clear neighbours that push along keep windows and the response calm.
    batch = batch_of([[gap] + [1e-9 if advantage > 0 else -1e-9] * 9], [advantage])
    tokens = loss_tokens(*batch.args())
    weight_N, _ = triage(DEFAULT, tokens, None)
    assert Region(int(token_regions(DEFAULT, tokens, 0.1)[0])).name.lower() == region
    assert float(weight_N[0]) == pytest.approx(weight, rel=1e-15)
    assert weight_N[1:].tolist() == [1.0] * 9


def test_a_window_of_high_risk_takes_its_widening_tokens_and_no_others():
    config = replace(DEFAULT, window=4, response_tail_frac=1.0)
    # First window: risks 1.9, 0.1, 0.0, so mean 0.667 > 0.5. The second holds the same 0.2 in calm company.
    batch = batch_of([[2.0, 0.2, 0.05, -0.3, 0.2, 0.0, 0.05, -0.3]], [1.0])
    tokens = loss_tokens(*batch.args())
    assert risky_windows(config, tokens, 0.1).tolist() == [True] * 4 + [False] * 4
    assert triage(config, tokens, None)[0].tolist() == [0.0, 0.0, 1.0, 1.0, 0.5, 1.0, 1.0, 1.0]


def test_windows_count_loss_tokens_of_one_response_only():
    config = replace(DEFAULT, window=3, response_tail_frac=1.0)
    # The wild token is the last of its response; the next response starts a window of its own.
    batch = batch_of([[0.2, 0.2, 0.2, 5.0], [0.2, 0.2]], [1.0, 1.0])
    assert triage(config, loss_tokens(*batch.args()), None)[0].tolist() == [0.5, 0.5, 0.5, 0.0, 0.5, 0.5]


def test_a_response_with_too_many_tail_tokens_loses_its_widening_ones():
    config = replace(DEFAULT, window=1, segment_risk=99.0)
    wild, calm = [-0.6] * 3, [-0.2] * 12
    exactly_a_fifth = triage(config, loss_tokens(*batch_of([wild + calm], [-1.0]).args()), None)[0]
    assert exactly_a_fifth.tolist() == [0.0] * 3 + [0.5] * 12
    weight_N, metrics = triage(config, loss_tokens(*batch_of([wild + calm[1:], calm], [-1.0, -1.0]).args()), None)
    assert weight_N.tolist() == [0.0] * 14 + [0.5] * 12
    assert metrics["triage/response_frac"] == 11 / 26


def test_truncate_applies_the_ratio_to_narrowing_tokens_only():
    config = replace(DEFAULT, narrowing="truncate", response_tail_frac=1.0, window=1)
    batch = batch_of([[-0.3, -3.0, 0.0]], [1.0])
    weight_N, _ = triage(config, loss_tokens(*batch.args()), None)
    torch.testing.assert_close(weight_N, torch.tensor([-0.3, 0.0, 0.0]).double().exp() * torch.tensor([1, 0.5, 1]))
    up = triage(config, loss_tokens(*batch_of([[3.0]], [-1.0]).args()), None)[0]
    assert up.tolist() == [2.0]


def test_weight_times_gap_never_grows_past_calm():
    """Power 1: the widening push stops growing with the error."""
    batch = random_batch(3, lengths=(400,), scale=0.2)
    tokens = loss_tokens(*batch.args())
    weight_N, _ = triage(replace(DEFAULT, response_tail_frac=1.0), tokens, None)
    push_N = weight_N * tokens.gap_N.abs()
    assert float(push_N[push_on_gap(tokens) > 0].max()) <= DEFAULT.calm * (1 + 1e-15)


def test_extremes_give_finite_weights_in_range():
    for config in VARIANTS.values():
        weight_N, metrics = triage(config, loss_tokens(*extreme_batch().args()), None)
        assert bool(weight_N.isfinite().all()) and float(weight_N.min()) >= 0
        assert float(weight_N.max()) <= config.ratio_high
        assert all(abs(value) < float("inf") for value in metrics.values())


def test_a_subnormal_gap_with_no_calm_is_no_nan_where_subnormals_are_flushed():
    config = VARIANTS["no calm"]
    tokens = loss_tokens(*batch_of([[-2e-309, -0.3]], [-1.0]).args())
    regions = torch.tensor([Region.WIDENING, Region.WIDENING])
    flushed = torch.set_flush_denormal(True)
    try:
        weight_N = region_weights(config, tokens, regions, 0.0)
    finally:
        torch.set_flush_denormal(False)
    assert flushed and weight_N.tolist() == [0.0, 0.0]


def test_region_metrics_against_hand_count():
    config = replace(DEFAULT, window=1, segment_risk=99.0, response_tail_frac=1.0)
    batch = batch_of([[0.2, 0.0, 0.0, 2.0, -0.3, float("nan"), 0.05, 0.4], [0.3]], [2.0, -1.0])
    weight_N, metrics = triage(config, loss_tokens(*batch.args()), None)
    pull = float((weight_N * torch.tensor([2.0] * 8 + [1.0])).sum())
    assert metrics["triage/widening_frac"] == 2 / 9
    assert metrics["triage/widening_weight"] == pytest.approx((0.5 + 0.25) / 2)
    assert metrics["triage/widening_grad_share"] == pytest.approx((1.0 + 0.5) / pull)
    assert metrics["triage/narrowing_frac_q1"] == 1 / 3  # the one-token response lies in q1
    assert metrics["triage/widening_frac_q1"] == 1 / 3
    assert metrics["triage/tail_frac_q2"] == 1 / 2
    assert metrics["triage/broken_frac_q3"] == 1 / 2
    assert metrics["triage/widening_frac_q4"] == 1 / 2
    assert metrics["triage/tail_weight"] == 0.0
    regions = [r.name.lower() for r in Region]
    assert sum(metrics[f"triage/{r}_frac"] for r in regions) == pytest.approx(1)
    assert sum(metrics[f"triage/{r}_grad_share"] for r in regions) == pytest.approx(1)


def test_auto_calm_is_a_decayed_observed_quantile():
    config = replace(DEFAULT, calm="auto", calm_quantile=0.9, calm_decay=0.75)
    state = TriageState()
    gap_N = torch.linspace(-0.1, 0.1, 201, dtype=torch.float64)
    first = state.observe(torch.cat([gap_N, torch.tensor([float("nan"), float("inf")])]), config)
    # 181 of 201 is the first rank that covers 0.9; abs() holds 0 once and every other value twice.
    assert first == gap_N.abs().sort().values[180]
    assert state.observe(2 * gap_N, config) == pytest.approx(0.75 * first + 0.25 * 2 * first)


def test_auto_calm_never_passes_the_negative_limit():
    config = replace(DEFAULT, calm="auto")
    state = TriageState()
    batch = batch_of([[-2.0, -3.0, -4.0]], [-1.0])
    weight_N, metrics = triage(config, loss_tokens(*batch.args()), state)
    assert metrics["triage/calm"] == config.limit_negative
    assert weight_N.tolist() == [0.0, 0.0, 0.0]


def test_auto_calm_survives_save_and_restore_bit_for_bit():
    config = replace(DEFAULT, calm="auto")
    straight, saved = TriageState(), TriageState()
    for seed in range(3):
        correct(config, *random_batch(seed, scale=0.05).args(), straight)
        correct(config, *random_batch(seed, scale=0.05).args(), saved)
    restored = TriageState()
    restored.load_state_dict(saved.state_dict())
    a = correct(config, *random_batch(9, scale=0.02).args(), straight)
    b = correct(config, *random_batch(9, scale=0.02).args(), restored)
    assert torch.equal(a.weight_T, b.weight_T) and a.metrics == b.metrics
    fresh = correct(config, *random_batch(9, scale=0.02).args(), TriageState())
    assert fresh.metrics["triage/calm"] != a.metrics["triage/calm"] < config.limit_negative


def test_auto_calm_of_an_empty_batch_changes_nothing():
    config = replace(DEFAULT, calm="auto")
    state = TriageState()
    assert state.observe(torch.zeros(0, dtype=torch.float64), config) == 0.0
    assert state.calm is None
    state.observe(torch.tensor([0.2], dtype=torch.float64), config)
    state.observe(torch.tensor([float("nan")], dtype=torch.float64), config)
    assert state.calm == 0.2


def test_auto_calm_without_a_state_is_an_error():
    with pytest.raises(ValueError, match="TriageState"):
        triage(replace(DEFAULT, calm="auto"), loss_tokens(*random_batch(0).args()), None)
