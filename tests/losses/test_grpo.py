"""The GRPO loss: value and gradient against a float64 formula, clips, masks, splits and extremes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from loss_batches import EXTREME_ADVANTAGES, batch_of, extreme_batch, random_batch

from minite.config.schema import AlgoConfig, CorrectionConfig
from minite.losses.correction import correct
from minite.losses.grpo import grpo_loss, mean_metrics
from minite.losses.triage_state import TriageState

PLAIN = AlgoConfig()
FULL = AlgoConfig(dual_clip=3.0, kl_coef=0.05, entropy_coef=0.01)


def _inputs(seed, spread=0.4):
    """logprob (leaf), old, advantage, mask, weight, ref, entropy (leaf): float64, some ratios outside every clip."""
    batch = random_batch(seed)
    rng = torch.Generator().manual_seed(seed)

    def noise():
        return torch.randn(batch.mask.numel(), generator=rng, dtype=torch.float64)

    logprob = (batch.old + (spread * noise() ** 3).clamp(-6, 6)).requires_grad_(True)
    weight = (noise().abs() * (noise() > -0.5)).float()
    return (
        logprob,
        batch.old,
        batch.advantage,
        batch.mask,
        weight,
        batch.old + 0.1 * noise(),
        noise().abs().requires_grad_(),
    )


def _scalar_loss_and_gradient(config, inputs, denominator):
    """Loss and d loss / d logprob, d loss / d entropy, token by token."""
    loss, slope_T, entropy_slope_T = 0.0, [], []
    for lp, old, a, m, w, ref, entropy in zip(*(value.tolist() for value in inputs), strict=True):
        if not m:
            slope_T.append(0.0)
            entropy_slope_T.append(0.0)
            continue
        ratio = math.exp(lp - old)
        low, high = 1 - config.clip_low, 1 + config.clip_high
        if (a >= 0 and ratio > high) or (a < 0 and ratio < low):
            term, slope = -a * min(max(ratio, low), high), 0.0
        elif a < 0 and config.dual_clip is not None and ratio > config.dual_clip:
            term, slope = -a * config.dual_clip, 0.0
        else:
            term, slope = -a * ratio, -a * ratio
        x = ref - lp
        loss += w * term + config.kl_coef * (math.exp(x) - x - 1) - config.entropy_coef * entropy
        slope_T.append((w * slope + config.kl_coef * (1 - math.exp(x))) / denominator)
        entropy_slope_T.append(-config.entropy_coef / denominator)
    return (
        loss / denominator,
        torch.tensor(slope_T, dtype=torch.float64),
        torch.tensor(entropy_slope_T, dtype=torch.float64),
    )


@pytest.mark.parametrize("config", [PLAIN, replace(PLAIN, dual_clip=1.5), FULL], ids=["plain", "dual", "full"])
@pytest.mark.parametrize("seed", range(3))
def test_value_and_gradient_against_the_formula(config, seed):
    inputs = _inputs(seed)
    logprob, old, advantage, mask, weight, ref, entropy = inputs
    out = grpo_loss(logprob, old, advantage, mask, weight, 100, config, ref, entropy)
    expected, slope_T, entropy_slope_T = _scalar_loss_and_gradient(config, inputs, 100)
    out.loss.backward()
    # Doubles on both sides: rounding of about 130 terms.
    assert out.loss.item() == pytest.approx(expected, rel=1e-12)
    torch.testing.assert_close(logprob.grad, slope_T, rtol=1e-12, atol=1e-16)
    torch.testing.assert_close(entropy.grad, entropy_slope_T, rtol=1e-12, atol=1e-16)
    assert out.metrics["clipped"] > 0


def test_gradient_against_finite_differences():
    logprob, old, advantage, mask, weight, ref, entropy = _inputs(0, spread=0.05)
    assert torch.autograd.gradcheck(
        lambda lp, h: grpo_loss(lp, old, advantage, mask, weight, 9, FULL, ref, h).loss, (logprob, entropy)
    )


@pytest.mark.parametrize(
    ("advantage", "ratio", "config", "loss", "slope"),
    [
        (1.0, 1.28, PLAIN, -1.28, -1.28),
        (1.0, 1.30, PLAIN, -1.28, 0.0),  # clip-higher
        (1.0, 0.10, PLAIN, -0.10, -0.10),  # a good token that fell is pulled back up
        (-1.0, 0.79, PLAIN, 0.80, 0.0),
        (-1.0, 5.00, PLAIN, 5.00, 5.00),  # unbounded without dual clip
        (-1.0, 5.00, FULL, 3.00, 0.0),
        (-2.0, 2.90, FULL, 5.80, 5.80),
        (1.0, 5.00, FULL, -1.28, 0.0),  # dual clip is for negative advantages only
    ],
)
def test_clips(advantage, ratio, config, loss, slope):
    config = replace(config, kl_coef=0.0, entropy_coef=0.0)
    logprob = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    ones = torch.ones(1, dtype=torch.float64)
    out = grpo_loss(logprob, 0 * ones, advantage * ones, ones.bool(), None, 1, config)
    out.loss.backward()
    assert out.loss.item() == pytest.approx(loss)
    assert float(logprob.grad) == pytest.approx(slope)
    assert out.metrics["clipped"] + out.metrics["dual_clipped"] == (slope == 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["none", "tis", "icepop", "triage", "auto"])
def test_no_gap_is_bitwise_plain_grpo(kind, dtype):
    logprob, old, advantage, mask, _, ref, entropy = _inputs(1)
    correction = CorrectionConfig(kind="triage", calm="auto") if kind == "auto" else CorrectionConfig(kind=kind)
    sequence = random_batch(1).sequence
    weight = correct(correction, old, old.clone(), advantage, mask, sequence, TriageState()).weight_T
    results = []
    for w in (None, weight):
        leaf = logprob.detach().to(dtype).requires_grad_()
        out = grpo_loss(leaf, old, advantage, mask, w, 77, FULL, ref, entropy)
        out.loss.backward()
        results.append((out.loss.detach(), leaf.grad, out.metrics))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert results[0][2] == results[1][2]


def test_poison_off_the_mask_reaches_nothing():
    clean = _inputs(2)
    logprob, old, advantage, mask, weight, ref, entropy = clean
    nan = torch.tensor(float("nan"))
    dirty = [
        torch.where(mask, value.detach(), nan.to(value.dtype))
        for value in (logprob, old, advantage, weight, ref, entropy)
    ]
    dirty[0].requires_grad_()
    dirty[5].requires_grad_()
    a = grpo_loss(logprob, old, advantage, mask, weight, 50, FULL, ref, entropy)
    b = grpo_loss(dirty[0], dirty[1], dirty[2], mask, dirty[3], 50, FULL, dirty[4], dirty[5])
    a.loss.backward()
    b.loss.backward()
    assert torch.equal(a.loss, b.loss) and a.metrics == b.metrics
    assert torch.equal(logprob.grad, dirty[0].grad) and torch.equal(entropy.grad, dirty[5].grad)


@pytest.mark.parametrize("correction", ["none", "tis", "icepop", "triage", "truncate"])
@pytest.mark.parametrize("config", [PLAIN, FULL], ids=["plain", "full"])
def test_extreme_gaps_give_finite_loss_and_gradient(config, correction):
    batch = extreme_batch()
    rule = (
        CorrectionConfig(kind="triage", narrowing="truncate")
        if correction == "truncate"
        else CorrectionConfig(kind=correction)
    )
    # The broken learner: old log-prob is what is infinite, and so is the log-prob of the step.
    for learner_breaks in (False, True):
        gap = batch.old - batch.sampler
        old, sampler = (gap, 0 * batch.old) if learner_breaks else (batch.old, batch.sampler)
        weight = correct(rule, old, sampler, batch.advantage, batch.mask, batch.sequence, None).weight_T
        logprob = old.clone().requires_grad_()
        zeros = torch.zeros_like(old)
        out = grpo_loss(logprob, old, batch.advantage, batch.mask, weight, 1000, config, zeros, zeros)
        out.loss.backward()
        assert bool(out.loss.isfinite()) and bool(logprob.grad.isfinite().all())
        assert all(math.isfinite(value) for value in out.metrics.values())


@pytest.mark.parametrize("advantage", EXTREME_ADVANTAGES)
@pytest.mark.parametrize("log_ratio", [0.0, 1e-8, -1e-8, 50.0, -50.0, 1e4, -1e4])
def test_extreme_policy_ratios_give_finite_loss_and_gradient(log_ratio, advantage):
    for config in (PLAIN, FULL):
        logprob = torch.full((1,), log_ratio, dtype=torch.float64, requires_grad=True)
        ones = torch.ones(1, dtype=torch.float64)
        out = grpo_loss(logprob, 0 * ones, advantage * ones, ones.bool(), None, 1, config, 0 * ones, ones)
        out.loss.backward()
        assert bool(out.loss.isfinite()) and bool(logprob.grad.isfinite().all())


def test_a_kept_token_without_a_number_is_not_hidden():
    batch = batch_of([[0.0, 0.0]], [1.0])
    logprob = torch.tensor([0.0, float("nan")], dtype=torch.float64)
    assert bool(grpo_loss(logprob, batch.old, batch.advantage, batch.mask, None, 2, PLAIN).loss.isnan())


def test_a_far_policy_is_still_pulled_to_the_reference():
    """The clamp inside k3 must not turn the slope of a far token round."""
    logprob = torch.tensor([30.0, -15.0], dtype=torch.float64, requires_grad=True)
    zeros = torch.zeros(2, dtype=torch.float64)
    config = replace(PLAIN, kl_coef=1.0)
    grpo_loss(logprob, logprob.detach(), zeros, zeros == 0, None, 1, config, zeros).loss.backward()
    assert float(logprob.grad[0]) == pytest.approx(1) and float(logprob.grad[1]) < -1e6


@pytest.mark.parametrize("denominator", [0, 5])
def test_empty_mask_has_loss_zero_and_gradient_zero(denominator):
    logprob, old, advantage, mask, weight, ref, entropy = _inputs(3)
    out = grpo_loss(logprob, old, advantage, torch.zeros_like(mask), weight, denominator, FULL, ref, entropy)
    out.loss.backward()
    assert out.loss.item() == 0 and not logprob.grad.any()
    assert mean_metrics(out.metrics)["loss/clip_frac"] == 0


def test_any_split_of_the_batch_adds_up():
    """Microbatches, data-parallel ranks, context-parallel slices in zigzag: each is some split of the tokens."""
    whole_inputs = _inputs(4)
    logprob, old, advantage, mask, weight, ref, entropy = whole_inputs
    tokens = int(mask.sum())
    whole = grpo_loss(logprob, old, advantage, mask, weight, tokens, FULL, ref, entropy)
    whole.loss.backward()
    total = mask.numel()
    zigzag = torch.arange(total) // 5 % 4
    for part_of in (
        zigzag,
        (zigzag == 1).long(),
        torch.randint(0, 7, (total,), generator=torch.Generator().manual_seed(0)),
    ):
        grad_T, losses, sums = torch.zeros(total, dtype=torch.float64), 0.0, {}
        for part in part_of.unique():
            index = (part_of == part).nonzero().flatten()
            picked = [value.detach()[index] for value in whole_inputs]
            picked[0].requires_grad_()
            out = grpo_loss(*picked[:5], tokens, FULL, *picked[5:])
            out.loss.backward()
            losses += float(out.loss.detach())
            grad_T[index] = picked[0].grad
            sums = {key: sums.get(key, 0.0) + value for key, value in out.metrics.items()}
        assert torch.equal(grad_T, logprob.grad)  # a token's gradient knows nothing of the split
        assert losses == pytest.approx(whole.loss.item(), rel=1e-12)
        assert sums == pytest.approx(whole.metrics, rel=1e-12)


def test_padding_changes_no_bit():
    inputs = _inputs(5)
    logprob, old, advantage, mask, weight, ref, entropy = inputs
    padded = [torch.cat([value.detach(), value.detach().new_zeros(33)]) for value in inputs]
    a = grpo_loss(logprob, old, advantage, mask, weight, 50, FULL, ref, entropy)
    b = grpo_loss(*padded[:5], 50, FULL, *padded[5:])
    assert torch.equal(a.loss, b.loss) and a.metrics == b.metrics


def test_only_logprob_and_entropy_carry_gradient():
    logprob, old, advantage, mask, weight, ref, entropy = _inputs(6)
    constants = [old, advantage, weight, ref]
    for value in constants:
        value.requires_grad_()
    grpo_loss(logprob, old, advantage, mask, weight, 50, FULL, ref, entropy).loss.backward()
    assert all(value.grad is None for value in constants)
    assert logprob.grad is not None and entropy.grad is not None


def test_mean_metrics_by_hand():
    ones = torch.ones(4, dtype=torch.float64)
    logprob = torch.tensor([0.0, math.log(2.0), 0.0, 9.0], dtype=torch.float64)
    weight = torch.tensor([1.0, 1.0, 0.0, 1.0])
    mask = torch.tensor([True, True, True, False])
    out = grpo_loss(logprob, 0 * ones, ones, mask, weight, 3, PLAIN, 0 * ones, 2 * ones)
    means = mean_metrics(out.metrics)
    assert means["loss/policy"] == pytest.approx((-1.0 - 1.28) / 3) == pytest.approx(out.loss.item())
    assert means["loss/clip_frac"] == 0.5  # of the kept tokens
    assert means["loss/policy_kl"] == pytest.approx((2 - 1 - math.log(2)) / 2)
    assert means["loss/ref_kl"] == pytest.approx((0.5 - 1 + math.log(2)) / 3)  # the dropped token still counts here
    assert means["entropy/mean"] == 2.0
    assert "entropy/mean" not in mean_metrics(grpo_loss(logprob, 0 * ones, ones, mask, None, 3, PLAIN).metrics)


def test_errors():
    logprob, old, advantage, mask, weight, ref, entropy = _inputs(0)
    with pytest.raises(ValueError, match="old_logprob_T has shape"):
        grpo_loss(logprob, old[1:], advantage, mask, weight, 1, PLAIN)
    with pytest.raises(ValueError, match="kl_coef.*needs ref_logprob_T"):
        grpo_loss(logprob, old, advantage, mask, weight, 1, FULL, None, entropy)
    with pytest.raises(ValueError, match="entropy_coef.*needs entropy_T"):
        grpo_loss(logprob, old, advantage, mask, weight, 1, FULL, ref, None)
