"""One learner process: training, log-probs, export, checkpoints."""

from __future__ import annotations

import dataclasses
import resource

import psutil
import pytest
import torch

from minite.backends.reference import ReferenceBackend
from minite.config.schema import AlgoConfig, FormatConfig, SamplerConfig
from minite.errors import UserError
from minite.models import get_model
from minite.sync.transport import UNQUANTIZED
from tests.learner.tiny_policy import LAYERS, VOCAB, batch, layout, learner, recipe

LENGTHS = [9, 14, 6, 11, 17, 8]


def _listening() -> set[str]:
    """Addresses on which this process takes connections, with their ports."""
    taken = [c for c in psutil.Process().net_connections("inet") if c.status == psutil.CONN_LISTEN]
    return {f"{c.laddr.ip}:{c.laddr.port}" for c in taken}


def test_a_learner_listens_on_loopback_only():
    before = _listening()
    with learner(recipe("qwen3")):
        opened = _listening() - before
    assert opened and all(address.startswith("127.0.0.1:") for address in opened), opened


def test_a_closed_learner_leaves_no_threads_and_files():
    process = psutil.Process()

    def held():
        return process.num_threads(), process.num_fds()

    with learner(recipe("qwen3")):
        pass
    before = held()
    for _ in range(3):
        with learner(recipe("qwen3")) as worker:
            assert held()[0] > before[0] + 8
    del worker
    assert max(held()[0] - before[0], held()[1] - before[1]) <= 2, (before, held())


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe"])
def test_supervised_steps_learn_a_fixed_batch(kind):
    with learner(recipe(kind, "w4a4")) as worker:
        losses = [worker.sft_step(batch(LENGTHS))["loss/sft"] for _ in range(15)]
        assert worker.step == 0
    assert losses[-1] < 0.75 * losses[0], losses


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "llama", "llama tied"])
def test_logprobs_equal_hugging_face(kind, tmp_path):
    """Whole model against an independent implementation, through an exported directory, FP32 storage."""
    from transformers import AutoModelForCausalLM

    kind, _, tied = kind.partition(" ")
    data, config = batch(LENGTHS), recipe(kind, dtype="fp32", sampler=SamplerConfig(temperature=0.7))
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, tie_word_embeddings=bool(tied)))
    with learner(config) as worker:
        worker.save_hf(tmp_path / "hf")
        logprob_T, entropy_T = worker.logprobs(data)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32, attn_implementation="eager")
    cu = data.cu_seqlens_S1.tolist()
    for start, end in zip(cu, cu[1:], strict=False):
        tokens = data.tokens_T[start:end]
        with torch.no_grad():
            log_softmax = (model(tokens[None]).logits[0].double() / 0.7).log_softmax(-1)
        expected = log_softmax[:-1].gather(-1, tokens[1:, None]).squeeze(-1)
        entropy = -(log_softmax.exp() * log_softmax).sum(-1)[:-1]
        # FP32 roundings of two layers, values of order 1: measured 2e-6.
        torch.testing.assert_close(logprob_T[start + 1 : end], expected, rtol=0, atol=2e-5)
        torch.testing.assert_close(entropy_T[start + 1 : end].double(), entropy, rtol=0, atol=2e-5)
        assert logprob_T[start] == 0 and entropy_T[start] == 0


@pytest.mark.parametrize("precision", ["bf16", "w4a4"])
def test_strict_logprobs_do_not_depend_on_the_batch(precision):
    data = batch(LENGTHS, replay=True)
    with learner(recipe(precision=precision, alignment="strict")) as worker:
        together = worker.logprobs(data)[0]
        cu = data.cu_seqlens_S1.tolist()
        for i in range(len(LENGTHS)):
            alone = worker.logprobs(data.select(torch.tensor([i])))[0]
            torch.testing.assert_close(alone, together[cu[i] : cu[i + 1]], rtol=0, atol=1e-12)


def _updated_logprobs(config, data):
    """Log-probs after one policy step."""
    with learner(config) as worker:
        metrics = worker.train_step(data, int(data.loss_mask_T.sum()))
        return metrics, worker.logprobs(data)[0]


def test_microbatches_and_order_do_not_change_a_step():
    """Strict mode, FP32 storage: what is left is the order of FP32 gradient sums."""
    data = batch(LENGTHS, replay=True)
    config = recipe(precision="w4a4", alignment="strict", dtype="fp32")
    metrics, expected = _updated_logprobs(config, data)
    for other, changed in (
        (layout(config, tokens_per_microbatch=20), data),
        (config, data.select(torch.tensor([4, 0, 5, 2, 1, 3]))),
    ):
        got_metrics, got = _updated_logprobs(other, changed)
        assert got_metrics == pytest.approx(metrics, rel=1e-5)
        spans = [got[a:b] for a, b in zip(changed.cu_seqlens_S1, changed.cu_seqlens_S1[1:], strict=False)]
        if changed is not data:
            spans = [spans[i] for i in (1, 4, 3, 5, 0, 2)]
        torch.testing.assert_close(torch.cat(spans), expected, rtol=0, atol=1e-5)


def test_recompute_changes_nothing():
    data, config = batch(LENGTHS, replay=True), recipe(precision="w4a4")
    plain, recomputed = (_updated_logprobs(layout(config, recompute=r), data) for r in (False, True))
    assert plain[0] == recomputed[0] and torch.equal(plain[1], recomputed[1])


def test_router_replay_uses_recorded_experts():
    data = batch(LENGTHS, replay=True)
    free = dataclasses.replace(data, routed_experts_TLk=None)
    unrecorded = dataclasses.replace(data, routed_experts_TLk=torch.full_like(data.routed_experts_TLk, -1))
    with learner(recipe()) as worker:
        own = worker.logprobs(free)[0]
        assert torch.equal(worker.logprobs(unrecorded)[0], own)
        assert (worker.logprobs(data)[0] - own).abs().max() > 0.01
    with learner(recipe(alignment="off", algo=AlgoConfig(router_replay=False))) as worker:
        assert torch.equal(worker.logprobs(data)[0], own)


def test_tokens_without_weight_or_mask_do_not_train():
    data = batch(LENGTHS)
    poisoned = dataclasses.replace(data, old_logprob_T=data.old_logprob_T.masked_fill(~data.loss_mask_T, float("nan")))
    config = recipe()
    expected, got = _updated_logprobs(config, data), _updated_logprobs(config, poisoned)
    assert expected[0] == got[0] and torch.equal(expected[1], got[1])
    silent = dataclasses.replace(data, weight_T=torch.zeros_like(data.weight_T))
    with learner(config) as worker:
        assert worker.train_step(silent, 10)["learner/grad_norm"] == 0.0


def test_nonfinite_gradient_skips_the_step():
    data = batch(LENGTHS)
    broken = dataclasses.replace(data, advantage_S=torch.full_like(data.advantage_S, float("nan")))
    with learner(recipe()) as worker:
        before = worker.export()[1].weight_digest
        skipped = worker.train_step(broken, 10)
        assert skipped["learner/skipped_steps"] == 1.0 and "learner/grad_norm" not in skipped
        assert worker.export()[1].weight_digest == before and worker.step == 1
        done = worker.train_step(data, 10)
        assert done["learner/skipped_steps"] == 0.0 and done["learner/grad_norm"] > 0
        assert worker.export()[1].weight_digest != before


def test_reference_policy_is_the_loaded_one(tmp_path):
    data, config = batch(LENGTHS), recipe(algo=AlgoConfig(kl_coef=0.1))
    with learner(config) as worker:
        worker.sft_step(data)
        worker.save_hf(tmp_path / "hf")
        worker.load_hf(tmp_path / "hf")
        start = worker.logprobs(data)[0]
        assert worker.train_step(data, 50)["loss/ref_kl"] == 0.0
        assert worker.train_step(data, 50)["loss/ref_kl"] > 0.0
        assert torch.equal(worker.logprobs(data, "ref")[0], start)
        assert not torch.equal(worker.logprobs(data)[0], start)


def test_export_names_everything_and_is_stable():
    config = recipe(precision="w4a4")
    with learner(config) as worker:
        buckets, version = worker.export()
        again, same = worker.export()
        worker.sft_step(batch(LENGTHS))
        assert worker.export()[1].weight_digest != version.weight_digest
    assert version == same and version.step == 0
    names = {key.partition("|")[0] for bucket in buckets for key in bucket}
    for name in get_model(config.model.kind).hf_tensors(config.model):
        assert name in names
    assert "model.layers.1.mlp.experts.5.up_proj.weight_amax" in names
    assert all(torch.equal(a[key], b[key]) for a, b in zip(buckets, again, strict=True) for key in a)


def test_weights_may_be_sent_in_the_models_dtype():
    config = recipe(precision="w4a4")
    plain = dataclasses.replace(config, sampler=dataclasses.replace(config.sampler, transport="model_dtype"))
    with learner(config) as worker:
        version = worker.export()[1]
    with learner(plain) as worker:
        buckets, same = worker.export()
        assert worker.export_seconds.keys() == {"gather", "pack", "stage"}
    assert same == version
    sent = {name: tensor for bucket in buckets[:-1] for name, tensor in bucket.items() if name != UNQUANTIZED}
    assert {name: tuple(t.shape) for name, t in sent.items()} == get_model(config.model.kind).hf_tensors(config.model)
    assert {t.dtype for t in sent.values()} == {torch.bfloat16}


def test_resume_is_bit_exact(tmp_path):
    data, config = batch(LENGTHS), recipe(precision="w4a4", alignment="strict")
    with learner(config) as worker:
        worker.sft_step(data)
        worker.train_step(data, 50)
        worker.save(tmp_path / "checkpoint")
        expected = worker.train_step(data, 50), worker.export()[1]
    with learner(config) as worker:
        worker.load(tmp_path / "checkpoint")
        assert worker.step == 1
        assert (worker.train_step(data, 50), worker.export()[1]) == expected
    with learner(recipe()) as worker, pytest.raises(UserError, match="plan digest"):
        worker.load(tmp_path / "checkpoint")


def _full_disk_of_torch(path):
    """What torch.save raises when there is no room."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4000, limits[1]))
    try:
        with pytest.raises(RuntimeError) as raised:
            torch.save(torch.zeros(100_000), path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return raised.value


def test_a_defect_during_a_save_is_not_taken_for_a_full_disk(monkeypatch, tmp_path):
    def broken(*_, **__):
        raise RuntimeError("a defect")

    with learner(recipe()) as worker:
        from minite.learner import checkpoint  # megatron comes in with the worker, not before

        assert checkpoint._of_disk(_full_disk_of_torch(tmp_path / "file"))
        for owner, name in ((checkpoint, "_write_common"), (checkpoint.MCoreSavePlanner, "create_local_plan")):
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="RuntimeError: a defect"):
                patch.setattr(owner, name, broken)
                worker.save(tmp_path / name)


def test_start_differs_by_seed_and_by_name():
    config = recipe()
    with learner(config) as worker:
        tensors, version = worker.export()
    weights = [t for name, t in tensors[0].items() if ".gate_proj." in name or ".up_proj." in name]
    assert len(weights) == 2 * 6 * LAYERS
    assert not any(torch.equal(a, b) for i, a in enumerate(weights) for b in weights[:i])
    with learner(dataclasses.replace(config, seed=6)) as worker:
        assert worker.export()[1].weight_digest != version.weight_digest


def test_probabilities_of_all_tokens_sum_to_one():
    prompt = torch.tensor([3, 1])
    tokens = torch.cat([torch.cat([prompt, torch.tensor([v])]) for v in range(VOCAB)])
    data = batch([3] * VOCAB)
    data.tokens_T = tokens
    with learner(recipe(precision="w4a4", alignment="strict")) as worker:
        logprob_T = worker.logprobs(data)[0]
    assert logprob_T[2::3].exp().sum() == pytest.approx(1.0, abs=1e-12)


def test_shard_that_cuts_a_block_is_an_error():
    """Heads of 8 rows in 16x16 blocks: megatron's order of heads would put other rows into a block than q_proj has."""
    config = recipe("qwen3", "w4a4")
    config = dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, head_dim=8),
        precision=dataclasses.replace(config.precision, formats={"w4a4": FormatConfig("nvfp4_2d", "nvfp4_row")}),
    )
    for _ in range(2):  # the second shows that the first left nothing behind
        with pytest.raises(UserError, match="q_proj would be cut into pieces of 8, .* of 16"), learner(config):
            pass


@pytest.mark.parametrize(
    ("op", "module"), [("gemm", "self_attn.qkv_proj"), ("grouped_gemm", "mlp.experts.gate_up_proj")]
)
def test_operands_that_the_backend_lacks_are_an_error(monkeypatch, op, module):
    reasons = lambda self, asked, weight, input: f"no {asked} here" if asked == op else None  # noqa: E731
    monkeypatch.setattr(ReferenceBackend, "unsupported_reason", reasons)
    expected = rf"model\.layers\.0\.{module}: .* of weight nvfp4_1d with input nvfp4_row: no {op} here"
    with pytest.raises(UserError, match=expected), learner(recipe(precision="w4a4")):
        pass


def test_response_that_no_microbatch_holds_is_an_error():
    with (
        learner(layout(recipe(), tokens_per_microbatch=16)) as worker,
        pytest.raises(UserError, match="tokens_per_microbatch is 16"),
    ):
        worker.logprobs(batch(LENGTHS))
