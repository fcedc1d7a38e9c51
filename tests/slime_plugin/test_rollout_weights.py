"""Weights and gap of a rollout: equal to minite.losses on the whole, however slime splits it over ranks."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from minite.config.schema import CorrectionConfig
from minite.diagnostics.gap import gap_metrics, gap_summary
from minite.errors import UserError
from minite.losses.correction import correct
from minite.losses.triage_state import TriageState
from slime_plugin import hooks
from slime_plugin.rollout import WeightBook, weigh

LENGTHS = [1, 40, 7, 130, 3, 64]


def rollout(seed=0):
    g = torch.Generator().manual_seed(seed)

    def lists(scale):
        return [scale * torch.randn(n, generator=g) for n in LENGTHS]

    old = lists(1.0)
    sampler = [a + b for a, b in zip(old, lists(0.5), strict=True)]
    sampler[1][3] = float("nan")
    return {
        "log_probs": old,
        "rollout_log_probs": sampler,
        "advantages": [torch.full((n,), (-1.0) ** i * (i + 1)) for i, n in enumerate(LENGTHS)],
        "loss_masks": [(torch.rand(n, generator=g) < 0.9).int() for n in LENGTHS],
    }


def part(data, index):
    return {key: [values[i] for i in index] for key, values in data.items()}


def run(data, split, config, state=None):
    """The weights of every rank, and the metrics, which must be the same on all."""
    parts = [part(data, index) for index in split]
    everything = [[{k: p[k][i] for k in p} for i in range(len(p["loss_masks"]))] for p in parts]
    results = [weigh(p, config, state or TriageState(), rank, lambda own: everything) for rank, p in enumerate(parts)]
    assert all(r.metrics == results[0].metrics and r.unhealthy == results[0].unhealthy for r in results)
    return {
        i: w for index, r in zip(split, results, strict=True) for i, w in zip(index, r.weights, strict=True)
    }, results[0]


@pytest.mark.parametrize("kind", ["triage", "tis", "icepop", "none"])
@pytest.mark.parametrize("calm", [0.1, "auto"])
def test_any_split_gives_the_weights_of_minite_losses(kind, calm):
    config = CorrectionConfig(kind=kind, calm=calm)
    data = rollout()
    cat = {key: torch.cat(values) for key, values in data.items()}
    sequence_T = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    mask_T = cat["loss_masks"].bool()
    expected = correct(
        config, cat["log_probs"], cat["rollout_log_probs"], cat["advantages"], mask_T, sequence_T, TriageState()
    )
    summary = gap_summary(cat["log_probs"], cat["rollout_log_probs"], cat["advantages"], mask_T)
    for split in ([[0, 1, 2, 3, 4, 5]], [[0, 3, 5], [1, 2, 4]], [[5], [4, 3, 0], [2, 1]]):
        weights, result = run(data, split, config)
        assert torch.equal(torch.cat([weights[i] for i in range(len(LENGTHS))]), expected.weight_T)
        assert result.unhealthy == expected.unhealthy
        for key, value in {**gap_metrics(summary), **expected.metrics}.items():
            assert result.metrics[key] == pytest.approx(value, rel=1e-12, abs=1e-15), key


def test_what_slime_did_not_compute_is_named():
    data = rollout()
    del data["log_probs"]
    with pytest.raises(UserError, match="rollout_data has no log_probs.*--get-mismatch-metrics"):
        weigh(data, CorrectionConfig(), TriageState(), 0, lambda own: [own])


def test_the_book_knows_responses_by_their_tensors_only():
    data = rollout()
    book = WeightBook()
    weights = [torch.full((n,), float(i)) for i, n in enumerate(LENGTHS)]
    book.write(data["rollout_log_probs"], weights)
    picked = [data["rollout_log_probs"][i] for i in (4, 1)]
    assert torch.equal(book.read(picked), torch.cat([weights[4], weights[1]]))
    with pytest.raises(UserError, match="not those of this rollout"):
        book.read([picked[0], picked[1].clone()])
    book.write(data["rollout_log_probs"][:1], weights[:1])
    with pytest.raises(UserError, match="not those of this rollout"):
        book.read(picked)


@pytest.mark.parametrize(
    ("replay", "address", "version", "refused"),
    [
        (True, None, "0.3.2", True),
        (True, None, "0.3.2.slime", False),
        (True, "10.0.0.1", "0.3.2", False),  # of the user: nothing is known of it
        (False, None, "0.3.2", False),
    ],
)
def test_a_router_that_drops_the_wish_for_routed_experts_is_refused(monkeypatch, replay, address, version, refused):
    monkeypatch.setitem(sys.modules, "sglang_router", SimpleNamespace(__version__=version))
    args = SimpleNamespace(use_rollout_routing_replay=replay, sglang_router_ip=address)
    with pytest.raises(UserError, match="drops return_routed_experts") if refused else nullcontext():
        hooks.check_router(args)
