"""Log-probs and entropy against float64 formulas; masked vocabularies; temperatures."""

import math

import pytest
import torch

from minite.layers import ops


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


# Logits reach 50 in magnitude: FP32 holds them and their log-sum to 4e-6, FP64 to 7e-15; a few roundings each.
@pytest.mark.parametrize("strict, tolerance", [(False, 2e-5), (True, 5e-14)])
@pytest.mark.parametrize("temperature", [1.0, 0.3])
def test_token_logprob_is_the_formula(strict, tolerance, temperature):
    logits, target = randn(6, 50) * 5, torch.arange(6) * 7
    scaled = logits.double() / temperature
    exact = torch.stack([scaled[t, v] - scaled[t].exp().sum().log() for t, v in enumerate(target)])
    actual = ops.token_logprob(logits, target, strict, temperature)
    assert actual.dtype == (torch.float64 if strict else torch.float32)
    torch.testing.assert_close(actual.double(), exact, rtol=0, atol=tolerance)


def test_temperature_by_row_equals_temperature_by_number():
    logits, temperature = randn(3, 9), torch.tensor([0.5, 1.0, 2.0])
    together = ops.log_softmax(logits, True, temperature)
    for t in range(3):
        one = slice(t, t + 1)
        torch.testing.assert_close(together[one], ops.log_softmax(logits[one], True, float(temperature[t])))


def test_masked_tokens_have_minus_infinity_and_no_entropy():
    logits = torch.tensor([[0.0, float("-inf"), 0.0, float("-inf")]], requires_grad=True)
    logprob = ops.log_softmax(logits, False)
    assert logprob[0, 1] == float("-inf")
    entropy = ops.entropy(logprob)
    torch.testing.assert_close(entropy, torch.tensor([math.log(2)]))
    entropy.sum().backward()
    assert logits.grad.isfinite().all()


def test_gradients():
    logits = randn(3, 7, dtype=torch.float64).requires_grad_()
    target = torch.tensor([0, 6, 3])
    assert torch.autograd.gradcheck(lambda z: ops.token_logprob(z, target, True, 0.7), (logits,))
    assert torch.autograd.gradcheck(lambda z: ops.entropy(ops.log_softmax(z, True)), (logits,))
