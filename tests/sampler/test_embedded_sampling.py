"""Drawing tokens: the right distribution, its log-prob, and randomness of (seed, position) alone."""

import numpy as np
import pytest
import torch
from tiny_engine import DENSE, config, engine, requests

from minite.sampler.embedded.sampling import BatchParams, request_seed, sample, truncate, uniform
from minite.sampler.engine import Request, SamplingParams

VOCAB, DRAWS = 12, 20_000
CPU = torch.device("cpu")


def logits(seed: int = 0) -> torch.Tensor:
    return 2 * torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def expected(row_V: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The distribution written out with sorts and loops."""
    probs = (row_V / params.temperature).softmax(-1).tolist()
    ranked = sorted(range(VOCAB), key=lambda i: -probs[i])[: params.top_k or VOCAB]
    total, kept, mass = sum(probs[i] for i in ranked), [], 0.0
    for i in ranked:
        kept.append(i)
        mass += probs[i] / total
        if mass >= params.top_p:
            break
    result = torch.zeros(VOCAB, dtype=torch.float64)
    result[kept] = torch.tensor([probs[i] for i in kept], dtype=torch.float64)
    return result / result.sum()


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1),
        SamplingParams(1, temperature=0.5),
        SamplingParams(1, temperature=3.0, top_k=5),
        SamplingParams(1, top_p=0.7),
        SamplingParams(1, temperature=1.5, top_k=6, top_p=0.8),
        SamplingParams(1, top_k=1),
        SamplingParams(1, top_p=1e-9),
        SamplingParams(1, top_k=100),
    ],
)
def test_distribution_and_logprob(params):
    row_BV = logits().expand(DRAWS, VOCAB)
    seeds, positions = np.divmod(np.arange(DRAWS, dtype=np.uint64), np.uint64(100))
    batch = BatchParams.of([params] * DRAWS, VOCAB, CPU)
    token_B, logprob_B = sample(row_BV, batch, torch.from_numpy(uniform(seeds, positions)), strict=True)
    p = expected(logits()[0], params)
    count = torch.bincount(token_B, minlength=VOCAB)
    sigma = (DRAWS * p * (1 - p)).sqrt()
    assert ((count - DRAWS * p).abs() <= 4 * sigma + 1e-9).all()  # 4 sigma; exactly 0 outside the support
    torch.testing.assert_close(logprob_B, p.log()[token_B], rtol=0, atol=1e-12)


def test_greedy_takes_the_best_and_reports_temperature_one():
    row_BV = torch.cat([logits(i) for i in range(50)])
    greedy = SamplingParams(1, temperature=0.0, top_k=1, top_p=0.1)
    hot = SamplingParams(1, temperature=5.0)
    for params in ([greedy] * 50, [greedy, hot] * 25):  # alone, and beside rows that draw
        token_B, logprob_B = sample(row_BV, BatchParams.of(params, VOCAB, CPU), torch.full((50,), 0.999), strict=True)
        rows = [i for i, p in enumerate(params) if p is greedy]
        assert torch.equal(token_B[rows], row_BV[rows].argmax(-1))
        wanted = row_BV[rows].log_softmax(-1).amax(-1)
        torch.testing.assert_close(logprob_B[rows], wanted, rtol=0, atol=1e-12)


def test_ties_at_the_cut_keep_the_lower_ids():
    kept = truncate(torch.zeros(1, 8), BatchParams.of([SamplingParams(1, top_k=3)], 8, CPU))
    assert (kept[0] > -torch.inf).nonzero().flatten().tolist() == [0, 1, 2]


@pytest.mark.parametrize("u", [0.0, 1 - 2.0**-52])
def test_the_ends_of_the_unit_interval_stay_in_the_support(u):
    row_BV = torch.tensor([[-torch.inf, 0.0, -torch.inf, -50.0, -torch.inf]], dtype=torch.float64)
    batch = BatchParams.of([SamplingParams(1)], 5, CPU)
    token_B, logprob_B = sample(row_BV, batch, torch.tensor([u], dtype=torch.float64), strict=True)
    assert token_B.item() in (1, 3) and logprob_B.item() > -torch.inf


def test_uniform_is_a_pure_function_and_uniform():
    seeds, positions = (a.flatten().astype(np.uint64) for a in np.meshgrid(np.arange(300), np.arange(300)))
    u = uniform(seeds, positions)
    assert np.array_equal(u[::-1], uniform(seeds[::-1].copy(), positions[::-1].copy()))
    assert u.min() >= 0 and u.max() < 1 and len(np.unique(u)) == len(u)
    counts = np.histogram(u, bins=64, range=(0, 1))[0]
    chi2 = ((counts - len(u) / 64) ** 2 / (len(u) / 64)).sum()
    assert abs(chi2 - 63) < 4 * np.sqrt(2 * 63)
    grid = u.reshape(300, 300) - 0.5  # neighbours in position and in seed are uncorrelated: sigma = 1 / sqrt(pairs)
    for a, b in ((grid[:-1], grid[1:]), (grid[:, :-1], grid[:, 1:]), (grid[:-1, :-1], grid[1:, 1:])):
        assert abs((a * b).mean() * 12) < 4 / np.sqrt(a.size)


def test_request_seeds_differ_by_run_and_request():
    seeds = {request_seed(run, f"r{i}") for run in range(10) for i in range(100)}
    assert len(seeds) == 1000 and all(0 <= s < 2**64 for s in seeds)
    assert request_seed(1, "a") == request_seed(1, "a")


def test_same_seed_same_tokens_whatever_came_before():
    e = engine(config(DENSE, alignment="strict"))
    wanted = requests(4, seed=7, max_new_tokens=8)
    first = [c.tokens for c in e.generate(wanted)]
    e.generate(requests(5, seed=8))
    assert [c.tokens for c in e.generate(wanted)] == first
    unseeded = [Request(f"u{i}", wanted[0].prompt_tokens, SamplingParams(8)) for i in range(4)]
    again = [c.tokens for c in e.generate(unseeded)]
    assert again == [c.tokens for c in engine(config(DENSE, alignment="strict")).generate(unseeded)]
    assert len({tuple(t) for t in again}) > 1
