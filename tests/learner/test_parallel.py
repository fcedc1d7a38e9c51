"""Two learner processes against one: tensor, expert and data parallel."""

from __future__ import annotations

import dataclasses
import functools
import re

import pytest
import torch

from minite.config.schema import FormatConfig
from minite.errors import UserError
from minite.ports import free_port
from minite.sync.verify import compare
from tests.learner import scenarios
from tests.learner.ranks import Ranks
from tests.learner.tiny_policy import batch, layout, learner, recipe

LENGTHS = [9, 14, 6, 11, 17]  # odd in number and in sum: ranks get unequal shares and padding
LAYOUTS = {
    "dense-tp2": ("qwen3", {"tensor_parallel": 2}),
    "llama-tp2": ("llama", {"tensor_parallel": 2}),
    "dense-dp2": ("qwen3", {"data_parallel": 2}),
    "moe-tp2": ("qwen3_moe", {"tensor_parallel": 2}),
    "moe-ep2": ("qwen3_moe", {"expert_parallel": 2}),
}


@pytest.fixture(scope="module")
def ranks():
    pool = Ranks(2)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def both(ranks):
    """Outcomes of one process and of two, from the same random start. Each pair is trained once."""

    @functools.cache
    def outcomes(name, alignment, dtype):
        kind, parallel = LAYOUTS[name]
        config = recipe(kind, "w4a4", alignment, dtype=dtype)
        data = batch(LENGTHS, replay=kind == "qwen3_moe")
        single = scenarios.train(0, 1, free_port(), config, data, None)
        return single, ranks.run(scenarios.train, layout(config, **parallel), data, None)

    return outcomes


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_compute_what_one_does(both, name):
    """Strict and FP32 storage: forward passes agree to FP64 sums (measured 9e-16), gradients to FP32 sums over ranks.

    Three steps of Adam spread that to 2e-7 in metrics and log-probs, as measured.
    """
    single, parts = both(name, "strict", "fp32")
    for part in parts:
        torch.testing.assert_close(part.logprob_T, single.logprob_T, rtol=0, atol=1e-12)
        torch.testing.assert_close(part.entropy_T, single.entropy_T, rtol=0, atol=1e-6)
        for got, expected in zip(part.metrics, single.metrics, strict=True):
            assert got == pytest.approx(expected, rel=1e-5, abs=1e-9)
        torch.testing.assert_close(part.after_T, single.after_T, rtol=0, atol=1e-5)
    assert compare(_tensors(single), _tensors(parts[0])) is None and parts[1].exported is None
    assert parts[0].exported[1].weight_digest == single.exported[1].weight_digest


@pytest.mark.parametrize("name", LAYOUTS)
def test_two_processes_agree_in_bf16(both, name):
    """The format of real runs: BF16 storage, FP32 sums. A sum in another order may flip a BF16 rounding (measured 1e-4
    in log-probs); tensor parallel also rounds each rank's input gradient before their sum (1e-3 of the norm)."""
    single, parts = both(name, "aligned", "bf16")
    for part in parts:
        gap = (part.logprob_T - single.logprob_T).abs()
        assert gap.mean() < 1e-3 and gap.max() < 0.02
        assert part.metrics[0]["learner/grad_norm"] == pytest.approx(single.metrics[0]["learner/grad_norm"], rel=0.01)


@pytest.mark.parametrize("name", ["dense-tp2", "moe-tp2"])
def test_two_processes_round_as_one_does(both, name):
    """Strict and BF16 storage: outer scales come after the sum over ranks, so that ties are rounded alike."""
    single, parts = both(name, "strict", "bf16")
    for part in parts:
        torch.testing.assert_close(part.logprob_T, single.logprob_T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["dense-tp2", "llama-tp2", "moe-tp2", "moe-ep2"])
def test_each_rank_holds_its_slice_of_the_unsharded_codes(both, name):
    single, parts = both(name, "aligned", "bf16")
    a, b = (part.codes for part in parts)
    expected = single.codes
    if name == "moe-ep2":
        assert torch.equal(torch.cat([a["fc1"], b["fc1"]]), expected["fc1"])
        assert torch.equal(torch.cat([a["fc2"], b["fc2"]]), expected["fc2"])
        assert torch.equal(a["qkv"], expected["qkv"])
        return
    assert torch.equal(torch.cat([a["qkv"], b["qkv"]]), expected["qkv"])
    assert torch.equal(torch.cat([a["proj"], b["proj"]], 1), expected["proj"])
    if name == "moe-tp2":  # experts are whole on every rank
        assert torch.equal(a["fc1"], expected["fc1"]) and torch.equal(b["fc1"], expected["fc1"])
    else:
        halves = [x["fc1"].chunk(2) for x in (a, b)]
        assert torch.equal(torch.cat([h[i] for i in range(2) for h in halves]), expected["fc1"])
        assert torch.equal(torch.cat([a["fc2"], b["fc2"]], 1), expected["fc2"])


@pytest.mark.parametrize("name", ["moe-tp2", "moe-ep2"])
def test_resume_in_two_processes_is_bit_exact(ranks, name, tmp_path):
    kind, parallel = LAYOUTS[name]
    config = layout(recipe(kind, "w4a4"), **parallel)
    for (metrics, exported), (metrics_again, exported_again) in ranks.run(
        scenarios.resume, config, batch(LENGTHS), tmp_path / "checkpoint"
    ):
        assert metrics == metrics_again
        if exported is not None:
            assert exported[1] == exported_again[1]


@pytest.mark.parametrize("name", ["dense-tp2", "moe-tp2", "moe-ep2", "dense-dp2"])
def test_a_checkpoint_is_read_under_another_layout(ranks, name, tmp_path):
    """One process, then two, then one again, against one that never stopped. The weights read are equal bytes; without
    Adam's state the second step would differ by more than FP32 sums in another order do (measured 1e-7)."""
    kind, parallel = LAYOUTS[name]
    config, data = recipe(kind, "w4a4", "strict", dtype="fp32"), batch(LENGTHS, replay=kind == "qwen3_moe")

    def here(source, target, steps):
        return scenarios.go_on(0, 1, free_port(), config, data, source, tmp_path / target, steps)

    _, straight = here(None, "0", 3)
    one, resumed = here(tmp_path / "0", "1", 1)
    two = layout(config, **parallel)
    (split, metrics), _ = ranks.run(scenarios.go_on, two, data, tmp_path / "0", tmp_path / "2", 2)
    back, again = here(tmp_path / "2", "3", 1)
    assert one.weight_digest == split.weight_digest and one.step == split.step == 1 and back.step == 2
    assert resumed == straight[1:2]
    for got, expected in zip([*metrics, *again], [*straight[1:], straight[2]], strict=True):
        assert got == pytest.approx(expected, rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("name", ["moe-tp2", "moe-ep2", "dense-dp2"])
def test_a_gradient_broken_on_one_rank_is_skipped_on_all(ranks, name):
    """NVFP4 gradients, whose quantizer must not raise while the other rank waits in the backward pass."""
    kind, parallel = LAYOUTS[name]
    config = layout(recipe(kind, "w4a4"), **parallel)
    formats = {"w4a4": FormatConfig("nvfp4_1d", "nvfp4_row", "nvfp4", "nvfp4")}
    config = dataclasses.replace(config, precision=dataclasses.replace(config.precision, formats=formats))
    told = ranks.run(scenarios.broken_gradient, config, batch(LENGTHS, replay=kind == "qwen3_moe"))
    for skipped, same, names in told:
        assert skipped == [0.0, 1.0, 0.0] and same == [False, True, False]
        assert "output_layer.weight" in names and names == told[0][2]


@pytest.mark.parametrize(("full", "room"), [(0, 100), (1, 4000)])
def test_a_full_disk_of_one_rank_is_told_by_all_and_training_goes_on(ranks, full, room, tmp_path):
    """Rank 0 has no room for the file that all share, rank 1 none for its own part."""
    config = layout(recipe("qwen3_moe", "w4a4"), tensor_parallel=2)
    for said in ranks.run(scenarios.save_on_a_full_disk, config, batch(LENGTHS), tmp_path, full, room):
        assert re.search("no_room: .*(File too large|inline_container)", said)


def test_weights_move_between_layouts_as_a_hugging_face_directory(ranks, tmp_path):
    config = recipe("qwen3_moe")
    ranks.run(scenarios.write_start, layout(config, tensor_parallel=2), tmp_path / "hf")
    with learner(recipe("qwen3_moe", dtype="bf16")) as worker:
        before = worker.export()[1]
        worker.sft_step(batch(LENGTHS))
        worker.load_hf(tmp_path / "hf")
        assert worker.export()[1] == before


def test_world_size_that_does_not_fit_the_layout_is_an_error():
    with (
        pytest.raises(UserError, match="1 processes were started, but .* needs 2"),
        learner(layout(recipe(), tensor_parallel=2)),
    ):
        pass


def _tensors(outcome):
    return {name: tensor for bucket in outcome.exported[0] for name, tensor in bucket.items()}
