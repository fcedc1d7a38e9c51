"""correct(): each kind by its published formula, and what all kinds share."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from loss_batches import Batch, batch_of, extreme_batch, random_batch

from minite.config.schema import CorrectionConfig
from minite.errors import UserError
from minite.losses import correction
from minite.losses.correction import KINDS, correct
from minite.losses.triage_state import TriageState

CONFIGS = {kind: CorrectionConfig(kind=kind, window=4) for kind in KINDS}
CONFIGS["triage truncate renormalized"] = replace(CONFIGS["triage"], narrowing="truncate", renormalize=True)
CONFIGS["triage auto"] = replace(CONFIGS["triage"], calm="auto")


def _correct(name, batch):
    return correct(CONFIGS[name], *batch.args(), TriageState())


def test_truncated_importance_sampling_formula():
    batch = random_batch(0, scale=1.5)
    ratio_T = (batch.old - batch.sampler).exp()
    expected_T = torch.where(batch.mask, torch.minimum(ratio_T, torch.tensor(2.0)), 0.0)
    out = _correct("tis", batch)
    torch.testing.assert_close(out.weight_T, expected_T.float(), rtol=0, atol=0)
    assert out.metrics["tis/truncated_frac"] == float((ratio_T > 2)[batch.mask].double().mean()) > 0


def test_icepop_formula_keeps_both_ends():
    batch = random_batch(0, scale=1.5)
    ratio_T = (batch.old - batch.sampler).exp()
    inside_T = (ratio_T >= 0.5) & (ratio_T <= 2)
    expected_T = torch.where(batch.mask & inside_T, ratio_T, 0.0)
    out = _correct("icepop", batch)
    torch.testing.assert_close(out.weight_T, expected_T.float(), rtol=0, atol=0)
    assert out.metrics["icepop/masked_frac"] == out.dropped_frac == float((~inside_T)[batch.mask].double().mean()) > 0
    edges = batch_of([[0.5, -0.25]], [1.0])
    config = replace(CONFIGS["icepop"], ratio_low=float(torch.tensor(-0.25).double().exp()),
                     ratio_high=float(torch.tensor(0.5).double().exp()))  # fmt: skip
    assert correct(config, *edges.args(), None).weight_T.min() > 0


@pytest.mark.parametrize("name", CONFIGS)
def test_no_gap_gives_weight_one_exactly(name):
    batch = random_batch(1)
    batch.sampler = batch.old.clone()
    out = _correct(name, batch)
    assert torch.equal(out.weight_T, batch.mask.float())
    assert out.dropped_frac == 0 and not out.unhealthy


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_off_the_mask_do_not_exist(name):
    clean, poisoned = random_batch(2), random_batch(2).poisoned()
    a, b = _correct(name, clean), _correct(name, poisoned)
    assert torch.equal(a.weight_T, b.weight_T)
    assert a.metrics == b.metrics


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_changes_nothing(name):
    batch = random_batch(3)
    total = batch.mask.numel()
    # A padding sequence of its own at the end, and padding that extends the last response.
    padded = Batch(
        *(torch.cat([value, value.new_full((7,), 5.0)]) for value in (batch.old, batch.sampler, batch.advantage)),
        torch.cat([batch.mask, torch.zeros(7, dtype=torch.bool)]),
        torch.cat([batch.sequence, batch.sequence[-1:], torch.full((6,), 99)]),
    )
    a, b = _correct(name, batch), _correct(name, padded)
    assert torch.equal(a.weight_T, b.weight_T[:total]) and not b.weight_T[total:].any()
    assert a.metrics == b.metrics


@pytest.mark.parametrize("name", CONFIGS)
def test_order_of_responses_changes_no_weight(name):
    batch = random_batch(4)
    order = torch.randperm(6, generator=torch.Generator().manual_seed(0))
    index = torch.cat([(batch.sequence == s).nonzero().flatten() for s in order])
    assert torch.equal(_correct(name, batch).weight_T[index], _correct(name, batch.take(index)).weight_T)


@pytest.mark.parametrize("name", list(KINDS))
def test_a_response_is_weighed_the_same_without_the_others(name):
    """So even weights computed on a data-parallel share would agree (fixed calm, no renormalization)."""
    batch = random_batch(5)
    whole_T = _correct(name, batch).weight_T
    for s in range(6):
        index = (batch.sequence == s).nonzero().flatten()
        assert torch.equal(_correct(name, batch.take(index)).weight_T, whole_T[index])


@pytest.mark.parametrize("name", CONFIGS)
def test_extremes_give_finite_weights_and_drop_every_broken_token(name):
    batch = extreme_batch()
    out = _correct(name, batch)
    broken_T = ~(batch.old - batch.sampler).isfinite()
    assert bool(out.weight_T.isfinite().all()) and float(out.weight_T.min()) >= 0
    assert not out.weight_T[broken_T].any()
    assert out.metrics["correction/broken_frac"] == float(broken_T.double().mean()) == 0.25
    assert all(abs(value) < float("inf") for value in out.metrics.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_empty_masks_and_empty_batches(name):
    batch = random_batch(6)
    batch.mask[:] = False
    for empty in (batch, batch.take(torch.zeros(0, dtype=torch.int64))):
        out = _correct(name, empty)
        assert out.weight_T.shape == empty.mask.shape and not out.weight_T.any()
        assert out.dropped_frac == 0 and not out.unhealthy


@pytest.mark.parametrize("broken_on", ["old", "sampler"])
@pytest.mark.parametrize("kind", KINDS)
def test_broken_tokens_are_dropped_whoever_broke_them(broken_on, kind):
    batch = batch_of([[0.0, 0.0, 0.0, 0.0]], [1.0])
    getattr(batch, broken_on)[1] = float("nan")
    getattr(batch, broken_on)[2] = float("-inf")
    out = _correct(kind, batch)
    assert out.weight_T.tolist() == [1.0, 0.0, 0.0, 1.0]
    assert out.dropped_frac == out.metrics["correction/broken_frac"] == 0.5


def test_unhealthy_is_more_than_the_allowed_fraction():
    batch = batch_of([[9.0, 9.0, 0.0, 0.0]], [1.0])
    for allowed, unhealthy in ((0.49, True), (0.5, False)):
        out = correct(replace(CONFIGS["triage"], max_dropped_frac=allowed), *batch.args(), None)
        assert (out.dropped_frac, out.unhealthy) == (0.5, unhealthy)


def test_renormalize_divides_by_the_kept_weight():
    batch = random_batch(7)
    plain_N = _correct("triage", batch).weight_T[batch.mask].double()
    scaled = correct(replace(CONFIGS["triage"], renormalize=True), *batch.args(), None)
    # float32 weights: half a unit in the last place of each side.
    torch.testing.assert_close(scaled.weight_T[batch.mask].double(), plain_N / plain_N.mean(), rtol=2e-7, atol=0)
    assert scaled.metrics["correction/weight_mean"] == pytest.approx(1)
    nothing_left = correct(replace(CONFIGS["triage"], renormalize=True), *batch_of([[9.0]], [1.0]).args(), None)
    assert nothing_left.weight_T.tolist() == [0.0]


def test_renormalization_does_not_see_the_order_of_tokens():
    """In doubles, where a plain sum would; the weights handed out are rounded to float32 after it."""
    rng = torch.Generator().manual_seed(0)
    weight_N = torch.rand(1001, generator=rng, dtype=torch.float64)
    orders = [torch.randperm(1001, generator=rng) for _ in range(20)]
    assert len({float(weight_N[order].sum()) for order in orders}) > 1
    expected_N = correction._to_mean_one(weight_N)
    assert all(torch.equal(expected_N[order], correction._to_mean_one(weight_N[order])) for order in orders)


def test_weights_are_constants_and_inputs_stay_untouched():
    batch = random_batch(8)
    before = [value.clone() for value in batch.args()]
    batch.old.requires_grad_(True)
    assert not _correct("triage truncate renormalized", batch).weight_T.requires_grad
    assert all(torch.equal(a, b) for a, b in zip(before, batch.args(), strict=True))


def test_with_triage_off_nothing_of_it_runs(monkeypatch):
    def refuse(*_):
        raise AssertionError("TRIAGE ran")

    monkeypatch.setitem(correction.KINDS, "triage", refuse)
    monkeypatch.setattr(TriageState, "observe", refuse)
    for kind in ("none", "tis", "icepop"):
        out = _correct(kind, random_batch(9))
        assert not [key for key in out.metrics if key.startswith("triage/")]
    with pytest.raises(AssertionError, match="TRIAGE ran"):
        _correct("triage", random_batch(9))


def test_errors():
    batch = random_batch(0)
    with pytest.raises(UserError, match=r"correction.kind: got 'mis', expected one of none, tis, icepop, triage"):
        correct(replace(CONFIGS["none"], kind="mis"), *batch.args(), None)
    with pytest.raises(ValueError, match="two separate runs"):
        correct(CONFIGS["none"], *batch_of([[0.0], [0.0], [0.0]], [1.0] * 3).args()[:4], torch.tensor([0, 1, 0]), None)
    with pytest.raises(ValueError, match="sampler_logprob_T has shape"):
        correct(CONFIGS["none"], batch.old, batch.sampler[1:], batch.advantage, batch.mask, batch.sequence, None)
    batch.advantage = torch.full_like(batch.advantage, float("nan"))
    with pytest.raises(ValueError, match="advantage_T"):
        correct(CONFIGS["none"], *batch.args(), None)
